"""The HTTP front of the cluster: OpenAI's API in, engine requests out. No ray here.

app ──> middleware ──> api ──> serving ──> routing, engines

Every command and every process of an application reads `settings`, and few need the routes, whose import takes half a
second: this file imports neither.
"""

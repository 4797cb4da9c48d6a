"""The HTTP front of the cluster: OpenAI's API in, engine requests out. It does not use Ray.

app ──> middleware ──> api ──> serving ──> routing, engines

Every command and process of an application imports `settings`, but few need the routes, whose import takes half a
second. So this file imports nothing.
"""

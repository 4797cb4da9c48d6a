"""Checks of a running server's answers, over HTTP: any OpenAI-compatible server will do."""

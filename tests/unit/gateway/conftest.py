"""Fixtures for tests of the gateway; here clients reach it through ASGI, without a socket."""

from ...helpers.gateway_fixtures import (
    disaggregated,
    grammars,
    model,
    responses,
    service,
    start,
    thinker,
    tokenizer,
)

__all__ = ["disaggregated", "grammars", "model", "responses", "service", "start", "thinker", "tokenizer"]

"""The gateway's fixtures, whose tests here speak to it through ASGI."""

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

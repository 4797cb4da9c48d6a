"""The gateway's fixtures, whose tests here open sockets."""

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

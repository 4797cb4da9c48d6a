"""The gateway's fixtures, whose tests here open sockets."""

from ...helpers.gateway_fixtures import disaggregated, grammars, model, responses, service, start, thinker, tokenizer
from .tool_calls import caller, tools

__all__ = [
    "caller",
    "disaggregated",
    "grammars",
    "model",
    "responses",
    "service",
    "start",
    "thinker",
    "tokenizer",
    "tools",
]

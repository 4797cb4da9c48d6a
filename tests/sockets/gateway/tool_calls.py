"""Functions that a model may ask its client to call, and calls as the tiny model writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel
from baton.engine.structured import XGrammarBackend
from baton.engine.text import ChatTemplate, Tokenizer

from ...helpers.gateway_service import Service
from ...helpers.tiny_model import TEMPLATE

TAUGHT = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ call.function.name }} {{ call.function.arguments.size }}\n</tool_call>{% endfor %}{% endfor %}"
)
SIZE = {"type": "object", "properties": {"size": {"enum": [1, 2, 3]}}, "required": ["size"]}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SIZE, **function}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TOOLS = [tool("cut"), tool("fold", description="in half")]


@pytest.fixture(scope="session")
def caller(model: ServedModel, tokenizer: Tokenizer) -> ServedModel:
    """A model whose template teaches calls."""
    template = ChatTemplate({"default": TAUGHT + TEMPLATE + "{# <tool_call> with name and arguments #}"})
    return replace(model, tokenizer=Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, template))


@pytest.fixture(params=[[Role.UNIFIED], [Role.PREFILL, Role.DECODE]], ids=["unified", "disaggregated"])
async def tools(
    start: Callable[..., Service], caller: ServedModel, grammars: XGrammarBackend, request: pytest.FixtureRequest
) -> Service:
    return start(*request.param, served=caller, grammars=grammars)


def script(service: Service, answer: str, told: str = "cut fold ", *, end: bool = True) -> None:
    """Set the model's answer to "hello" when the prompt has these functions."""
    service.script(f"{told}<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", answer, end=end)


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

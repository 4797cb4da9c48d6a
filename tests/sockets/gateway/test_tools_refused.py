"""Functions, choices and templates with which no calls can be made, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel
from baton.engine.text import ChatTemplate, Tokenizer

from ...helpers.gateway_service import Service
from ...helpers.tiny_model import TEMPLATE
from .tool_calls import SIZE, TOOLS, allowed, calls_of, script, tool

pytestmark = pytest.mark.exhaustive

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no kind": ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "a name with blanks": ({"tools": [tool("a b")]}, "tools[0].function.name"),
    "a schema that is none": ({"tools": [tool("f", parameters="{}")]}, "tools[0].function.parameters"),
    "a name twice": ({"tools": [tool("f"), tool("f")]}, "tools"),
    "too many": ({"tools": [tool(f"f{index}") for index in range(129)]}, "tools"),
    "one that is not there": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "melt"}}},
        "tool_choice",
    ),
    "one that is not there among the allowed": (
        {"tools": TOOLS, "tool_choice": allowed("auto", "cut", "melt")},
        "tool_choice",
    ),
    "no mode": (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [tool("cut")]}}},
        "tool_choice.allowed_tools.mode",
    ),
    "none allowed": ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    "none to choose from": ({"tool_choice": "required"}, "tool_choice"),
    "spaces in a format as well": (
        {"tools": TOOLS, "structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    "a tag that is none as well": (
        {"tools": TOOLS, "structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
    ),
    "a long schema": (
        {"tools": [tool("f", parameters={"title": "x" * 140_000})], "tool_choice": "required"},
        "tools",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "param"), REFUSED.values(), ids=REFUSED)
async def test_invalid_tools_are_refused_with_their_path(
    start: Callable[..., Service], caller: ServedModel, asked: dict[str, Any], param: str
) -> None:
    response = await start(Role.UNIFIED, served=caller).chat("hello", **asked)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert str(error["param"]).startswith(param), error
    assert error["message"]


BROKEN = {"type": "object", "properties": {"size": {"type": "integr"}}}
DROPPED = {"type": "object", "properties": {"size": {"not": {}}}}
WORDS = {"type": "json_schema", "json_schema": {"name": "n", "schema": SIZE}}
ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "a function's schema": ({"tools": [TOOLS[0], tool("b", parameters=BROKEN)]}, "tools[1].function.parameters"),
    "one that would not be kept": (
        {"tools": [TOOLS[0], tool("b", parameters=DROPPED)]},
        "tools[1].function.parameters",
    ),
    "the words' schema": (
        {"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BROKEN}}},
        "response_format.json_schema.schema",
    ),
    "a function's schema beside the words'": (
        {"tools": [tool("a", strict=True, parameters=BROKEN)], "response_format": WORDS},
        "tools[0].function.parameters",
    ),
    "a pattern": ({"tools": TOOLS, "structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    "a grammar": ({"tools": TOOLS, "structured_outputs": {"grammar": "root ::= gone"}}, "structured_outputs.grammar"),
}


@pytest.mark.parametrize(("asked", "param"), ENGINES.values(), ids=ENGINES)
async def test_a_schema_that_an_engine_refuses_has_the_name_of_the_clients_field(
    tools: Service, asked: dict[str, Any], param: str
) -> None:
    choice = {} if "response_format" in asked or "structured_outputs" in asked else {"tool_choice": "required"}
    answer = await tools.chat("hello", max_tokens=5, **choice, **asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"'{param}' ")
    assert "structural" not in error["message"]
    if not param.startswith("tools"):
        return
    functions = [{"type": "function", **each["function"]} for each in asked["tools"]]
    body = {"model": "tiny", "input": "hello", "tools": functions, "tool_choice": "required"}
    error = (await tools.http.post("/v1/responses", json=body)).json()["error"]
    assert error["param"] == param.replace(".function", "")
    assert error["message"].startswith(f"'{error['param']}' ")


async def test_tools_need_a_template_that_renders_them(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer
) -> None:
    template = ChatTemplate({"default": TEMPLATE + "{# <tool_call> with arguments #}"})
    untold = Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, template)
    service = start(Role.UNIFIED, served=replace(model, tokenizer=untold))
    response = await service.chat("hello", tools=TOOLS)
    assert response.status_code == 400
    assert "chat_template.jinja" in response.json()["error"]["message"]
    message = {"role": "user", "content": "hello"}
    function = TOOLS[0]["function"]
    counted: dict[str, dict[str, Any]] = {
        "/tokenize": {"messages": [message], "tools": TOOLS},
        "/v1/messages/count_tokens": {"messages": [message], "tools": [{"name": "f", "input_schema": {}}]},
        "/v1/responses/input_tokens": {"input": "hello", "tools": [{"type": "function", **function}]},
    }
    for path, body in counted.items():  # no prompt has these tools, so their tokens cannot be counted
        response = await service.http.post(path, json={"model": "tiny", **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools"), path


async def test_calls_are_not_guaranteed_without_a_grammar_of_their_format(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer
) -> None:
    words = "{% if tools %}{% endif %}{# [func_name1(params_name1=params_value1)] #}"
    template = ChatTemplate({"default": TEMPLATE + words})
    pythonic = Tokenizer(tokenizer.backend, {"eos_token": "<|im_end|>"}, template)
    service = start(Role.UNIFIED, served=replace(model, tokenizer=pythonic))
    script(service, "[cut(size=2)]", told="")
    (choice,) = (await service.chat("hello", tools=TOOLS)).json()["choices"]
    assert (calls_of(choice["message"]), choice["finish_reason"]) == ([("cut", {"size": 2})], "tool_calls")
    asked: dict[str, dict[str, Any]] = {
        "tool_choice": {"tool_choice": "required"},
        "tools[0].function.strict": {"tools": [tool("cut", strict=True)]},
        "response_format": {"response_format": {"type": "json_object"}},
        "structured_outputs": {"structured_outputs": {"regex": "a"}},
    }
    for param, fields in asked.items():
        response = await service.chat("hello", **{"tools": TOOLS, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")


async def test_tools_for_a_model_without_tool_calls_are_refused(service: Service) -> None:
    response = await service.chat("hello", tools=TOOLS)
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == ("tools", "unsupported_parameter")
    assert (await service.chat("hello", tools=TOOLS, tool_choice="none", max_tokens=2)).status_code == 200

"""Refusals of `/v1/responses`: by its own field names, with an alternative."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.contracts import Role
from baton.cluster.gateway.api.responses import parse_response
from baton.cluster.gateway.api.responses_request import REFUSED, ResponsesRequest
from baton.cluster.gateway.errors import ApiError

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import TOOLS

KINDS = [
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "input_text",
    "output_text",
    "function",
    "user",
]
WORDS = st.sampled_from(
    [*ResponsesRequest.model_fields, *REFUSED, "type", "role", "content", "call_id", "name", "format"]
)
ITEM: dict[str, Any] = {"role": "user", "content": "hello"}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "a", "name": "cut", "arguments": "{}"}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "a", "output": "1"}


@pytest.fixture
async def service(start: Callable[..., Service]) -> Service:
    return start(Role.UNIFIED)


async def refused(service: Service, fields: dict[str, Any]) -> dict[str, Any]:
    response = await service.http.post("/v1/responses", json={"model": "tiny", "input": "hello", **fields})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


KEEPS = {
    "store": True,
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "background": True,
    "prompt": {"id": "pmpt_1"},
    "truncation": "auto",
    "context_management": [{"type": "compaction"}],
    "moderation": {"model": "any"},
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"ttl": "12h"},
}


@pytest.mark.parametrize(("field", "value"), KEEPS.items(), ids=KEEPS)
async def test_stateful_features_are_refused_by_name(service: Service, field: str, value: Any) -> None:
    error = await refused(service, {field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert "not supported" in error["message"]
    assert error["message"].endswith(".")


NOTHING: dict[str, Any] = {
    "store": False,
    "previous_response_id": None,
    "conversation": None,
    "background": False,
    "truncation": "disabled",
    "instructions": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": None,
    "text": {"format": None, "verbosity": "medium"},
    "reasoning": {"effort": None, "summary": None},
    "include": [],
    "metadata": None,
    "service_tier": "auto",
    "stream_options": None,
    "max_tool_calls": 5,
    "top_logprobs": 0,
}


async def test_fields_without_effect_are_accepted(service: Service) -> None:
    response = await service.http.post(
        "/v1/responses", json={"model": "tiny", "input": "hello", "max_output_tokens": 1, **NOTHING}
    )
    assert response.status_code == 200, response.text


def content(part: Any) -> dict[str, Any]:
    return {"input": [ITEM, {"role": "user", "content": [part]}]}


SOME = {"type": "allowed_tools", "mode": "auto"}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({"input": None}, "input", "list, not null"),
    "an empty input": ({"input": []}, "input", "at least 1"),
    "an input that is none": ({"input": 3}, "input", "list"),
    "an item that is none": ({"input": [ITEM, 3]}, "input[1]", "object"),
    "an item that is kept": (
        {"input": [{"type": "item_reference"}]},
        "input[0].type",
        "send each item whole",
    ),
    "an item of a tool": ({"input": [{"type": "web_search_call"}]}, "input[0]", "'web_search_call'"),
    "a role": ({"input": [{**ITEM, "role": "tool"}]}, "input[0].role", "'user'"),
    "an image": (content({"type": "input_image", "image_url": "x"}), "input[1].content[0]", "'input_image'"),
    "a text that is none": (content({"type": "input_text", "text": 3}), "input[1].content[0].text", "string"),
    "a field of a part": (content({"type": "input_text", "text": "", "a": 1}), "input[1].content[0].a", "'a'"),
    "annotations": (
        content({"type": "output_text", "text": "", "annotations": [{}]}),
        "input[1].content[0].annotations",
        "at most 0",
    ),
    "arguments": ({"input": [{**CALL, "arguments": "1"}]}, "input[0].arguments", "JSON object"),
    "many calls in one turn": ({"input": [{**CALL, "call_id": str(at)} for at in range(129)]}, "input", "129 calls"),
    "an output without its call": ({"input": [ITEM, OUTPUT]}, "input[1].call_id", "send the call"),
    "an output of another call": ({"input": [{**CALL, "call_id": "b"}, OUTPUT]}, "input[1].call_id", "'a'"),
    "sealed thoughts": (
        {"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]},
        "input[0].encrypted_content",
        "another server",
    ),
    "a tool of the server's": ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search'"),
    "a custom tool": ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0]", "'custom'"),
    "a chat's tool": ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools[0].name", "required"),
    "a tool that is given twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "cut"),
    "a choice": ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'auto'"),
    "a choice among some": ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode", "required"),
    "a choice among others": (
        {"tools": TOOLS, "tool_choice": {**SOME, "tools": [{"type": "function", "name": "a"}]}},
        "tool_choice",
        "'a'",
    ),
    "a choice of none": ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice", "'a'"),
    "a format": ({"text": {"format": {"type": "xml"}}}, "text.format", "'xml'"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "required"),
    "a schema's name": (
        {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
        "text.format.name",
        "pattern",
    ),
    "a long schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"title": "x" * 140_000}}}},
        "text.format.schema",
        "131072",
    ),
    "a schema for a choice": (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"choice": ["a"]}},
        "text.format",
        "not both",
    ),
    "verbosity": ({"text": {"verbosity": "high"}}, "text.verbosity", "'medium'"),
    "a summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "'auto'"),
    "no such effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
    "an effort": ({"reasoning": {"effort": "high"}}, "reasoning.effort", "chat template"),
    "results of a tool": ({"include": ["file_search_call.results"]}, "include[0]", "logprobs"),
    "logprobs": ({"top_logprobs": 21}, "top_logprobs", "20"),
    "tokens": ({"max_output_tokens": 0}, "max_output_tokens", "at least"),
    "too many tokens": ({"max_output_tokens": 10_000}, "max_output_tokens", "context length"),
    "a long input": ({"input": "hello " * 500}, "input", "context length"),
    "temperature": ({"temperature": 200}, "temperature", "temperature"),
    "obfuscation": ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options", "False"),
    "options of no stream": ({"stream_options": {"resumable": True}}, "stream_options", "'stream'"),
    "a chat's messages": ({"messages": [ITEM]}, "messages", "'input'"),
    "a chat's limit": ({"max_tokens": 5}, "max_tokens", "'max_output_tokens'"),
    "a chat's format": ({"response_format": {"type": "text"}}, "response_format", "'text.format'"),
    "several choices": ({"n": 2}, "n", "Unrecognized"),
    "a misspelt name": ({"instruction": "x"}, "instruction", "'instructions'"),
    "a name like a tag": ({"text": {"<text>": 1}}, "text", "'<text>'"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "param", "reason"), WRONG.values(), ids=WRONG)
async def test_invalid_fields_are_refused_by_name(
    service: Service, fields: dict[str, Any], param: str, reason: str
) -> None:
    error = await refused(service, fields)
    assert error["param"] is not None
    assert error["param"].startswith(param)
    assert reason.lower() in error["message"].lower()
    assert "messages" not in error["message"] or "messages" in fields
    answer = await service.http.post("/v1/responses", json={"model": "tiny", "input": "hello", "max_output_tokens": 1})
    assert answer.status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
ITEMS = st.lists(st.dictionaries(WORDS, JSON | st.sampled_from(KINDS), max_size=5) | JSON, max_size=3)


@given(st.dictionaries(WORDS, JSON | ITEMS, max_size=5), JSON | ITEMS)
def test_every_body_is_parsed_or_refused(fields: dict[str, Any], items: Any) -> None:
    with suppress(ApiError):
        parse_response({"model": "tiny", "input": items, **fields})


async def test_tools_need_a_model_with_tool_calls(service: Service) -> None:
    error = await refused(service, {"tools": TOOLS})
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")


@pytest.mark.parametrize(
    "body", ["", "[]", "{", '{"model": "tiny", "input": "a", "input": "b"}', '{"input": "\\ud800"}']
)
async def test_bodies_that_are_no_object_are_refused(service: Service, body: str) -> None:
    response = await service.http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


async def test_other_methods_and_kept_responses_are_no_routes(service: Service) -> None:
    assert (await service.http.put("/v1/responses", content=json.dumps({}))).status_code == 405
    kept = await service.http.get("/v1/responses/resp_1")
    assert kept.status_code == 404
    assert "/v1/responses" in kept.json()["error"]["message"]

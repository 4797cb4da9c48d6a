"""Refusals name a field of the request in terms of JSON, and show no internals of the server, whatever is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.gateway.api.anthropic_input import parse_messages
from baton.cluster.gateway.api.anthropic_request import FIELDS, CountTokensRequest
from baton.cluster.gateway.api.parsing import parse_request
from baton.cluster.gateway.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from baton.cluster.gateway.api.responses import parse_response
from baton.cluster.gateway.errors import ApiError

from .hostile_requests import CALL, REQUESTS, TAG, JsonPath, chat, name_of, places, response, within

SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": {}, "strict": True}}
NAMED = {"type": "function", "function": {"name": "cut"}}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    **REQUESTS,
    "a chat's further fields": chat(
        messages=[{"role": "user", "content": "x"}],
        **{"stream": True, "stream_options": {"include_usage": True, "resumable": True}, "n": 1},
        **{"response_format": SCHEMA_FORMAT, "parallel_tool_calls": True, "reasoning_effort": "low"},
        **{"store": False, "service_tier": "auto", "prompt_logprobs": 1, "baton_timeline": True, "ignore_eos": False},
        **{"add_generation_prompt": True, "continue_final_message": False, "max_completion_tokens": 2},
    ),
    "grammars": chat(
        structured_outputs={"json": "{}", "regex": "a", "choice": ["a"], "grammar": "a", "structural_tag": TAG},
    ),
    "allowed tools": chat(
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
        tools=[{"type": "function", "function": {"name": "cut", "description": "d", "parameters": {}, "strict": True}}],
    ),
    "a response's further fields": response(
        **{"instructions": "i", "include": ["reasoning.encrypted_content"], "max_tool_calls": 1, "top_logprobs": 1},
        **{"reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}}, "stream": True},
        **{"stream_options": {"resumable": True}, "parallel_tool_calls": True},
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "cut"}]},
    ),
}
PARSERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "/v1/completions": lambda body: parse_request(CompletionRequest, body),
    "/v1/chat/completions": lambda body: parse_request(ChatRequest, body),
    "/v1/responses": parse_response,
    "/v1/responses/input_tokens": parse_response,
    "/v1/messages": parse_messages,
    "/v1/messages/count_tokens": lambda body: FIELDS.parse(CountTokensRequest, body),
    "/tokenize": lambda body: parse_request(TokenizeChatRequest if "messages" in body else TokenizeTextRequest, body),
    "/detokenize": lambda body: parse_request(DetokenizeRequest, body),
}
# Terms of pydantic, msgspec and Python, tags of unions, names of classes and functions.
INTERNALS = re.compile(
    r"literal\[|function-|lambda|valid (dictionary|list|string|integer|number|boolean)|instance of|\binput (should|tag)"
    r"|validation|discriminator|is not valid|\bNone\b|\bTrue\b|\bFalse\b|dict\b|Error\b|object at 0x|<\w*>"
    r"|[a-z][A-Z][a-z]",
)
WRONG: list[Any] = [
    *(None, True, 1, 1.5, -1, 10**20, "x", "", [], {}, [1], ["x"], [None], [{}], [[]], {"a": 1}),
    *({"type": "x"}, {"type": "function"}, {"type": None}, {"type": []}, {"type": "allowed_tools"}, [True], [1.0]),
]


def changed(body: dict[str, Any], place: JsonPath, value: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(body))
    within(copy, place[:-1])[place[-1]] = value
    return copy


def refusal(path: str, body: dict[str, Any]) -> ApiError | None:
    try:
        PARSERS[path](body)
    except ApiError as error:
        return error
    return None


def names_of(value: Any) -> Iterator[str]:
    """Yield the name of every field and element of the value."""
    for place in places(value):
        name = name_of(place)
        assert name is not None
        yield name


def check(error: ApiError, body: dict[str, Any], path: str) -> None:
    assert error.status == 400
    assert error.param, error.message
    assert error.param in error.message or error.code == "unknown_parameter", error.message
    parent, _, missing = error.param.rpartition(".")
    there = {*names_of(body), ""}
    assert error.param in there or (parent in there and missing.isidentifier()), (path, error.param)
    written = json.dumps(body)
    told = re.sub(r"'([^']*)'", lambda quoted: "" if quoted[1] in written else quoted[0], error.message)
    assert not INTERNALS.search(told), error.message
    assert error.message.endswith((".", "?"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE)
def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_field(name: str) -> None:
    path, body = MORE[name]
    num_refused = 0
    for place in places(body):
        for value in WRONG:
            wrong = changed(body, place, value)
            error = refusal(path, wrong)
            if error is not None:
                num_refused += 1
                check(error, wrong, path)
                about = name_of(place) or ""
                if error.code != "unsupported_parameter" and not about.startswith(error.param or ""):
                    assert (error.param or "").startswith(about.split("[")[0].split(".")[0])
    assert num_refused > 3


PARTS = {part for _, body in MORE.values() for place in places(body) for part in place}
KEYS = st.sampled_from(sorted(part for part in PARTS if isinstance(part, str)))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@given(st.sampled_from(sorted(MORE)), st.integers(0, 200), JSON)
def test_whatever_value_a_field_has_the_refusal_names_a_field(name: str, index: int, value: Any) -> None:
    path, body = MORE[name]
    all_places = list(places(body))
    wrong = changed(body, all_places[index % len(all_places)], value)
    error = refusal(path, wrong)
    if error is not None:
        assert error.param
        assert error.param.split(".")[0].split("[")[0] in {*wrong, "input", "messages", "prompt", "tokens", "model"}
        assert "literal[" not in error.message
        assert "<lambda>" not in error.message


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "any"}, "tool_choice", "'tool_choice' must be 'none', 'auto' or 'required', not 'any'."),
        ({"tool_choice": 3}, "tool_choice", "'tool_choice' must be 'none', 'auto' or 'required'."),
        (
            {"tool_choice": {"type": "any"}},
            "tool_choice.type",
            "'tool_choice.type' must be 'function' or 'allowed_tools', not 'any'.",
        ),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "must be an object, or one as a string"),
        ({"stream_options": 3}, "stream_options", "'stream_options' must be an object, not an integer."),
        ({"temperature": "1"}, "temperature", "'temperature' must be a number, not a string."),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "'logit_bias.5' must be a number, not a string."),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object, not a list."),
        ({"user": None, "stop": [None]}, "stop[0]", "'stop[0]' must be a string, not null."),
    ],
)
def test_refusals_use_the_terms_of_json(fields: dict[str, Any], param: str, message: str) -> None:
    error = refusal("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": ""}], **fields})
    assert error is not None
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    "body",
    [
        {"x" * 10**6: 1},
        {"messages": [{"role": "user", "content": "", "x" * 10**6: 1}]},
        {"messages": [{"role": "x" * 10**6, "content": ""}]},
        {"tool_choice": {"type": "x" * 10**6}},
        {"logit_bias": {"x" * 10**6: 1}},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "x" * 10**6}]},
    ],
    ids=["a field", "a field within", "a value", "a type", "a key", "an id"],
)
def test_a_refusal_repeats_little_of_what_a_client_sent(body: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x"}]
    error = refusal("/v1/chat/completions", {"model": "tiny", "messages": messages, **body})
    assert error is not None
    assert len(error.message) + len(error.param or "") < 1000

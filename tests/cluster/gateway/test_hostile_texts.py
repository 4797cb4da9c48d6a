"""Texts that tend to break whoever reads them, in every field of every endpoint: refused by name, or harmless."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from gateway_service import Service
from thinking_model import TEMPLATE

from baton.cluster.contracts import Role
from baton.cluster.gateway import ServedModel
from baton.cluster.gateway.api.json_body import MAX_DEPTH, MAX_DIGITS, first_json_fault
from baton.engine.structured import XGrammarBackend
from baton.engine.text import ChatTemplate, Tokenizer

JsonPath = tuple[str | int, ...]

SCHEMA = {"type": "object", "title": "t", "properties": {"size": {"enum": [1, "two"]}}, "required": ["size"]}
FORMAT = {"name": "n", "description": "d", "schema": SCHEMA, "strict": True}
FUNCTION = {"name": "cut", "description": "d", "parameters": SCHEMA, "strict": True}
SHARED: dict[str, Any] = {
    "model": "tiny",
    **{"temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "min_tokens": 0, "priority": 1},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 1.0}},
    **{"stop": ["zz"], "stop_token_ids": [5], "allowed_token_ids": [6, 7], "bad_words": ["fox"]},
    **{"cache_salt": "s", "user": "u", "metadata": {"k": "v"}, "safety_identifier": "x", "prompt_cache_key": "y"},
}
CALL = {"id": "a", "index": 0, "type": "function", "function": {"name": "cut", "arguments": '{"size": 1}'}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "me"},
    {"role": "assistant", "content": "w", "tool_calls": [CALL], "reasoning_content": "t", "parsed": {"a": "b"}},
    {"role": "tool", "tool_call_id": "a", "content": "1"},
]
ITEMS = [
    {"role": "user", "content": "hello"},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "w", "logprobs": ["q"]}]},
    {"type": "function_call", "id": "f", "call_id": "a", "name": "cut", "arguments": '{"size": 1}'},
    {"type": "function_call_output", "call_id": "a", "output": "1"},
]
TAG = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "a"}})
STRUCTURED = {"json": SCHEMA, "regex": "a+", "choice": ["a", "b"], "grammar": 'root ::= "a"', "structural_tag": TAG}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **fields}


def response(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": "tiny", "input": ITEMS, "max_output_tokens": 2, **fields}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": completion(**SHARED, n=1, logprobs=1, echo=True),
    "completions of tokens": completion(prompt=[[5, 6]], stream=True, stream_options={"include_usage": True}),
    "completions of a format": completion(response_format={"type": "json_schema", "json_schema": FORMAT}),
    **{f"completions of a {kind}": completion(structured_outputs={kind: what}) for kind, what in STRUCTURED.items()},
    "chat": chat(**SHARED, logprobs=True, top_logprobs=1, chat_template_kwargs={"k": "v"}),
    "chat with tools": chat(
        messages=MESSAGES[:2],
        tools=[{"type": "function", "function": FUNCTION}],
        tool_choice={"type": "function", "function": {"name": "cut"}},
    ),
    "responses": response(**SHARED, instructions="i", chat_template_kwargs={"k": "v"}),
    "responses with tools": response(
        input="x",
        tools=[{"type": "function", **FUNCTION}],
        tool_choice={"type": "function", "name": "cut"},
        text={"format": {"type": "json_schema", **FORMAT}},
    ),
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": "x"}),
    "tokenize a chat": ("/tokenize", {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"k": "v"}}),
    "detokenize": ("/detokenize", {"model": "tiny", "tokens": [5, 6]}),
}


@pytest.fixture(scope="module")
def told(thinker: ServedModel) -> ServedModel:
    """A model whose template tells all that it is given."""
    template = TEMPLATE.replace("call.function.arguments.size", "call.function.arguments | tojson")
    template = template.replace("tool.function.name", "tool | tojson") + "{{ k | tojson if k is defined else '' }}"
    tokenizer = Tokenizer(thinker.tokenizer._backend, {"eos_token": "<|im_end|>"}, ChatTemplate({"default": template}))
    return replace(thinker, tokenizer=tokenizer, max_model_len=512)


@pytest.fixture
async def service(start: Callable[..., Service], told: ServedModel, grammars: XGrammarBackend) -> Service:
    return start(Role.UNIFIED, served=told, grammars=grammars)


def places(value: Any, place: JsonPath = ()) -> Iterator[JsonPath]:
    """Yield the paths of all parts of a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*place, key)
        yield from places(part, (*place, key))


def within(body: Any, place: JsonPath) -> Any:
    for key in place:
        body = body[key]
    return body


def with_text(body: dict[str, Any], place: JsonPath, text: str) -> bytes:
    """The body with this JSON at its place."""
    changed = json.loads(json.dumps(body))
    within(changed, place[:-1])[place[-1]] = "here"
    return json.dumps(changed).replace('"here"', text).encode()


def name_of(place: JsonPath) -> str | None:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".") or None


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_requests_are_right_as_they_are(service: Service, name: str) -> None:
    path, body = REQUESTS[name]
    answer = await service.http.post(path, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("half", ['"\\ud800"', '"a\\uDFFFb"', '"\\udc00\\ud800"'], ids=["high", "low", "in turn"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(
    service: Service, name: str, half: str
) -> None:
    path, body = REQUESTS[name]
    for place in places(body):
        answer = await service.http.post(path, content=with_text(body, place, half))
        assert answer.status_code == 400, place
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (name_of(place), "invalid_json")
        assert name_of(place) in error["message"]


@pytest.mark.parametrize("name", REQUESTS)
async def test_and_so_is_a_key_with_one(service: Service, name: str) -> None:
    path, body = REQUESTS[name]
    for place in [(), *(place for place in places(body) if isinstance(within(body, place), dict))]:
        answer = await service.http.post(
            path, content=with_text(body, (*place, "new"), "1").replace(b'"new"', b'"\\ud800"')
        )
        assert answer.status_code == 400, place
        assert answer.json()["error"]["param"] == name_of(place)


DEEP = MAX_DEPTH + 10
HOSTILE = {
    "an infinity": "1e999",
    "a negative infinity": "-1e999",
    "an integer of 400 digits": "9" * 400,
    "the longest that Python reads": "9" * 4300,
    "one that it does not": "9" * 4301,
    "the longest that is allowed": "9" * MAX_DIGITS,
    "the largest double": "1.7976931348623157e308",
    "a NUL": '"a\\u0000b"',
    "150 000 letters": json.dumps("x" * 150_000),
    "150 000 spaces": json.dumps(" " * 150_000),
    "lists in lists": "[" * DEEP + "]" * DEEP,
    "objects in objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "lists as deep as may be": "[" * (MAX_DEPTH - 20) + "]" * (MAX_DEPTH - 20),
    "1000 lists": "[" * 1000 + "]" * 1000,
    "JSON with half a pair": json.dumps('{"size": "\\ud800"}'),
    "JSON with an infinity": json.dumps('{"size": 1e999, "a": NaN}'),
    "JSON with a long integer": json.dumps('{"size": ' + "9" * 4300 + "}"),
    "JSON that is deep": json.dumps('{"size": ' + "[" * 900 + "]" * 900 + "}"),
    "an object": '{"\\u0000": 1, "type": "x"}',
    "nothing": "null",
}


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_nothing_that_a_field_may_hold_breaks_the_server(service: Service, hostile: str) -> None:
    for path, body in REQUESTS.values():
        for place in places(body):
            answer = await service.http.post(path, content=with_text(body, place, HOSTILE[hostile]))
            assert answer.status_code in (200, 400, 404, 413), (path, place, answer.text)
    answer = await service.http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 1})
    assert answer.status_code == 200
    await service.cluster.settled()


@pytest.mark.parametrize("arguments", ["JSON with half a pair", "JSON with a long integer", "JSON that is deep"])
async def test_arguments_that_nobody_can_work_with_are_refused_by_name(service: Service, arguments: str) -> None:
    for path, place in (
        ("/v1/chat/completions", ("messages", 2, "tool_calls", 0, "function", "arguments")),
        ("/v1/responses", ("input", 3, "arguments")),
    ):
        _, body = chat() if "chat" in path else response()
        answer = await service.http.post(path, content=with_text(body, place, HOSTILE[arguments]))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name_of(place)


FAULTS: dict[str, tuple[str, JsonPath | None, str]] = {
    "pairs": ('{"a": "\\ud83e\\udd8a"}', None, ""),
    "an escaped backslash": ('{"a": "\\\\ud800"}', None, ""),
    "half a pair": ('{"a": [1, {"b": "\\ud800"}]}', ("a", 1, "b"), "surrogate"),
    "a key": ('{"a": {"\\ud800": 1}}', ("a",), "key"),
    "an infinity": ('{"a": [1e999]}', ("a", 0), "larger than"),
    "an infinity in digits": ('{"a": ' + "9" * 400 + ".5}", ("a",), "larger than"),
    "a small number": ('{"a": 1e-999}', None, ""),
    "a long integer among tokens": ('{"a": [1, 2, -' + "9" * 309 + "]}", ("a", 2), "308 digits"),
    "one that is not too long": ('{"a": [1, 2, ' + "9" * 308 + "]}", None, ""),
    "digits in a text": ('{"a": "' + "9" * 400 + '"}', None, ""),
    "a deep list": ('{"a": [1, ' + "[" * 128 + "]" * 128 + "]}", ("a",), "128 deep"),
    "one that is not too deep": ('{"a": ' + "[" * 127 + "]" * 127 + "}", None, ""),
    "many that are flat": ('{"a": [' + "[]," * 1000 + "[]]}", None, ""),
}


@pytest.mark.parametrize(("text", "place", "message"), FAULTS.values(), ids=FAULTS)
def test_faults_are_found_where_they_are(text: str, place: JsonPath | None, message: str) -> None:
    fault = first_json_fault(text.encode(), json.loads(text))
    if place is None:
        assert fault is None
    else:
        assert fault is not None
        assert fault.place == place
        assert message in fault.message

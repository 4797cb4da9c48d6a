"""Texts that often break parsers, in every field of every endpoint: each is refused by name, or harmless."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.api.json_body import MAX_DEPTH, MAX_DIGITS, first_json_fault
from baton.cluster.gateway.model import ServedModel
from baton.engine.structured import XGrammarBackend
from baton.engine.text import ChatTemplate, Tokenizer

from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import TEMPLATE
from .hostile_requests import (
    REQUESTS,
    JsonPath,
    chat,
    name_of,
    places,
    response,
    within,
)

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def told(thinker: ServedModel) -> ServedModel:
    """A model whose template renders every variable that it gets."""
    template = TEMPLATE.replace("call.function.arguments.size", "call.function.arguments | tojson")
    template = template.replace("tool.function.name", "tool | tojson") + "{{ k | tojson if k is defined else '' }}"
    tokenizer = Tokenizer(thinker.tokenizer.backend, {"eos_token": "<|im_end|>"}, ChatTemplate({"default": template}))
    return replace(thinker, tokenizer=tokenizer, max_model_len=512)


@pytest.fixture
async def service(start: Callable[..., Service], told: ServedModel, grammars: XGrammarBackend) -> Service:
    return start(Role.UNIFIED, served=told, grammars=grammars)


def with_text(body: dict[str, Any], place: JsonPath, text: str) -> bytes:
    """Return the body with this JSON text at `place`."""
    changed = json.loads(json.dumps(body))
    within(changed, place[:-1])[place[-1]] = "here"
    return json.dumps(changed).replace('"here"', text).encode()


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
async def test_the_unchanged_requests_are_answered(service: Service, name: str) -> None:
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
        code = error["details"]["error_code"] if path.startswith("/v1/messages") else error["code"]
        assert (error["param"], code) == (name_of(place), "invalid_json")
        assert name_of(place) in error["message"]


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_key_with_half_a_surrogate_pair_is_refused_by_name(service: Service, name: str) -> None:
    path, body = REQUESTS[name]
    for place in [(), *(place for place in places(body) if isinstance(within(body, place), dict))]:
        answer = await service.http.post(
            path, content=with_text(body, (*place, "new"), "1").replace(b'"new"', b'"\\ud800"')
        )
        assert answer.status_code == 400, place
        assert answer.json()["error"].get("param") == name_of(place)


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
    "JSON with an infinity": json.dumps('{"size": 1e999}'),
    "JSON with what is no number": json.dumps('{"size": NaN}'),
    "JSON with a long integer": json.dumps('{"size": ' + "9" * 4300 + "}"),
    "JSON that is deep": json.dumps('{"size": ' + "[" * 900 + "]" * 900 + "}"),
    "an object": '{"\\u0000": 1, "type": "x"}',
    "nothing": "null",
}


@pytest.mark.slow
@pytest.mark.parametrize("hostile", HOSTILE)
async def test_no_text_in_any_field_breaks_the_server(service: Service, hostile: str) -> None:
    for path, body in REQUESTS.values():
        for place in places(body):
            answer = await service.http.post(path, content=with_text(body, place, HOSTILE[hostile]))
            assert answer.status_code in (200, 400, 404, 413), (path, place, answer.text)
    answer = await service.http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 1})
    assert answer.status_code == 200
    await service.cluster.settled()


@pytest.mark.parametrize("arguments", [name for name in HOSTILE if name.startswith("JSON ")])
async def test_unusable_arguments_are_refused_by_name(service: Service, arguments: str) -> None:
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
    "an infinity in digits and an exponent": ('{"a": 1' + "0" * 250 + "e99}", ("a",), "larger than"),
    "the shortest of these": ('{"a": ' + "9" * 210 + "e99}", ("a",), "larger than"),
    "the longest that is finite": ('{"a": ' + "9" * 209 + "e99}", None, ""),
    "a small number": ('{"a": 1e-999}', None, ""),
    "a long integer among tokens": ('{"a": [1, 2, -' + "9" * 309 + "]}", ("a", 2), "308 digits"),
    "one that is not too long": ('{"a": [1, 2, ' + "9" * 308 + "]}", None, ""),
    "digits in a text": ('{"a": "' + "9" * 400 + '"}', None, ""),
    "a deep list": ('{"a": [1, ' + "[" * 128 + "]" * 128 + "]}", ("a",), "128 deep"),
    "one that is not too deep": ('{"a": ' + "[" * 127 + "]" * 127 + "}", None, ""),
    "many that are flat": ('{"a": [' + "[]," * 1000 + "[]]}", None, ""),
}


@pytest.mark.parametrize(("text", "place", "message"), FAULTS.values(), ids=FAULTS)
def test_faults_are_reported_with_their_path(text: str, place: JsonPath | None, message: str) -> None:
    fault = first_json_fault(text.encode(), json.loads(text))
    if place is None:
        assert fault is None
    else:
        assert fault is not None
        assert fault.place == place
        assert message in fault.message

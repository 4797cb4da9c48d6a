"""Structured outputs over HTTP, through one engine and through a hand-off."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from baton.cluster.contracts import Role
from baton.engine.core.messages import EngineError, ErrorKind
from baton.engine.structured import XGrammarBackend

from ...helpers.gateway_service import Service

pytestmark = pytest.mark.exhaustive

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</a>"},
}


def is_paint(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "response_format": ({"response_format": AS_JSON}, is_paint),
    "json": ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_paint),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, is_paint),
    "regex": ({"structured_outputs": {"regex": "[ab]{2}-[0-9]"}}, re.compile("[ab]{2}-[0-9]").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"].__contains__),
    "grammar": ({"structured_outputs": {"grammar": 'root ::= "<" [xy] ">"'}}, re.compile("<[xy]>").fullmatch),
    "tag": ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, re.compile("<a>[0-9]</a>").fullmatch),
}


@pytest.fixture(params=[[Role.UNIFIED], [Role.PREFILL, Role.DECODE]], ids=["unified", "disaggregated"])
async def structured(
    start: Callable[..., Service], grammars: XGrammarBackend, request: pytest.FixtureRequest
) -> Service:
    return start(*request.param, grammars=grammars)


@pytest.mark.parametrize(("asked", "check"), KINDS.values(), ids=KINDS)
async def test_answers_fit_their_grammar(
    structured: Service, asked: dict[str, Any], check: Callable[[str], object]
) -> None:
    for seed in range(3):
        response = await structured.chat("hello", seed=seed, max_tokens=200, **asked)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        if choice["finish_reason"] == "length":  # the schema does not limit whitespace
            assert "response_format" in asked
            continue
        assert check(choice["message"]["content"]), choice
        assert choice["finish_reason"] == "stop"


async def test_completions_and_streams_fit_too(structured: Service) -> None:
    asked = {"structured_outputs": {"choice": ["naïve 😀", "other"]}, "max_tokens": 60}
    whole = (await structured.complete("hello", seed=1, n=3, **asked)).json()["choices"]
    assert {choice["text"] for choice in whole} <= {"naïve 😀", "other"}
    async with structured.openai() as client:
        stream = await client.completions.create(
            model="tiny",
            prompt="hello",
            seed=1,
            max_tokens=60,
            stream=True,
            extra_body={"structured_outputs": asked["structured_outputs"]},
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole[0]["text"]


async def test_an_answer_continues_on_another_engine_within_its_grammar(
    start: Callable[..., Service], grammars: XGrammarBackend
) -> None:
    asked = {"structured_outputs": {"regex": "([a-f]{3}-){20}end"}, "seed": 5, "max_tokens": 200}
    undisturbed = start(Role.UNIFIED, grammars=grammars)
    expected = (await undisturbed.complete("hello", **asked)).json()["choices"][0]
    assert re.fullmatch("([a-f]{3}-){20}end", expected["text"])
    for tokens in (1, 5, 20):
        service = start(Role.UNIFIED, Role.UNIFIED, grammars=grammars)
        for engine in service.cluster.members:
            engine.die_after_tokens = tokens
            engine.on_death = lambda members=service.cluster.members: [
                setattr(member, "die_after_tokens", None) for member in members
            ]
        answer = (await service.complete("hello", **asked)).json()["choices"][0]
        assert sum(engine.alive for engine in service.cluster.members) == 1
        assert answer["text"] == expected["text"]


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "type": ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    "no schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "json_schema",
    ),
    "a schema that is none": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integr"}}}},
        "response_format.json_schema.schema",
        "'response_format.json_schema.schema' cannot be compiled",
    ),
    "a schema that would be broken": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format.json_schema.schema",
        "'not' is not supported",
    ),
    "a long schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "x" * 140_000}}}},
        "response_format.json_schema.schema",
        "131072",
    ),
    "two at once": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex, choice"),
    "nothing": ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    "both ways": (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "not both",
    ),
    "a pattern": (
        {"structured_outputs": {"regex": "(a"}},
        "structured_outputs.regex",
        "'structured_outputs.regex' cannot be compiled",
    ),
    "a grammar": (
        {"structured_outputs": {"grammar": "root ::= gone"}},
        "structured_outputs.grammar",
        '"gone" is not defined',
    ),
    "whitespace": (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "not supported",
    ),
    "an old name": ({"guided_json": SCHEMA}, "guided_json", "'structured_outputs.json'"),
    "a misspelt name": ({"structured_outputs": {"jason": {}}}, "structured_outputs.jason", "Unrecognized"),
    "with min_tokens": (
        {"structured_outputs": {"regex": "a"}, "min_tokens": 2, "max_tokens": 9},
        "min_tokens",
        "structured_outputs",
    ),
}


@pytest.mark.parametrize(("asked", "param", "reason"), REFUSED.values(), ids=REFUSED)
async def test_constraints_that_cannot_be_enforced_are_refused(
    structured: Service, asked: dict[str, Any], param: str | None, reason: str
) -> None:
    response = await structured.chat("hello", **asked)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]
    assert error["message"].endswith(".")
    assert not error["message"].endswith("..")
    assert (await structured.chat("hello", max_tokens=2)).status_code == 200, "other requests must still be served"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("bad_words_token_ids", "bad_words"),
        ("allowed_token_ids", "allowed_token_ids"),
        ("logprobs", "top_logprobs"),
        ("structured_outputs.choice", "structured_outputs.choice"),
        ("", None),
    ],
)
async def test_a_field_that_an_engine_refuses_has_the_clients_name(
    start: Callable[..., Service], field: str, param: str | None
) -> None:
    service = start(Role.UNIFIED)
    service.cluster.members[0].refuse = EngineError(ErrorKind.INVALID, "is wrong", field)
    answer = await service.chat("hello", structured_outputs={"choice": ["a"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"] == ("is wrong" if param is None else f"'{param}' is wrong.")


async def test_the_refusal_of_a_prompt_that_no_engine_can_hold_names_messages(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    service.cluster.members[0].refuse = EngineError(ErrorKind.TOO_LONG, "a prompt of 9 tokens is too long")
    body: dict[str, dict[str, Any]] = {
        "prompt": {"path": "/v1/completions", "prompt": "x"},
        "messages": {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "x"}]},
        "input": {"path": "/v1/responses", "input": "x"},
    }
    for param, fields in body.items():
        answer = await service.http.post(fields.pop("path"), json={"model": "tiny", **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (413, param)


async def test_the_response_format_text_is_accepted(structured: Service) -> None:
    response = await structured.chat("hello", max_tokens=4, response_format={"type": "text"}, structured_outputs=None)
    assert response.status_code == 200

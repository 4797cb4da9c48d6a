"""Values at the edge of what OpenAI's API takes are taken or refused as there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.model import ServedModel

from ...helpers.gateway_service import Service

CALL = {"id": "a", "type": "function", "function": {"name": "cut", "arguments": "{}"}}
USER = {"role": "user", "content": "hello"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "1"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hello"},
}
LIMITS = {"/v1/completions": "max_tokens", "/v1/chat/completions": "max_completion_tokens"}
LIMITS["/v1/responses"] = "max_output_tokens"


@pytest.fixture
async def service(start: Callable[..., Service]) -> Service:
    return start(Role.UNIFIED)


async def asked(service: Service, path: str, **fields: Any) -> dict[str, Any]:
    """Return the sampling parameters and the seed that the engine got."""
    answer = await service.http.post(path, json={"model": "tiny", **BODIES[path], LIMITS[path]: 2, **fields})
    assert answer.status_code == 200, answer.text
    request = service.cluster.members[0].submitted[-1]
    return {"max_tokens": request.sampling.max_tokens, "top_p": request.sampling.top_p, "seed": request.seed}


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_number_is_an_integer_in_any_notation(service: Service, path: str) -> None:
    assert (await asked(service, path, **{LIMITS[path]: 3.0}))["max_tokens"] == 3
    assert (await asked(service, path, seed=7.0))["seed"] == 7
    answer = await service.http.post(path, json={"model": "tiny", **BODIES[path], LIMITS[path]: 3.5})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, LIMITS[path])


@pytest.mark.parametrize("path", BODIES)
async def test_top_p_may_be_zero(service: Service, path: str) -> None:
    assert (await asked(service, path, top_p=0))["top_p"] == 0.0


@pytest.mark.parametrize("path", BODIES)
async def test_a_negative_seed_means_the_same_everywhere(service: Service, path: str) -> None:
    assert (await asked(service, path, seed=-5))["seed"] == 2**63 - 5
    drawn = [(await asked(service, path, seed=-1))["seed"] for _ in range(3)]
    assert len(set(drawn)) == 3, "-1 must mean no seed, as in vLLM"


TURNS: dict[str, tuple[list[dict[str, Any]], str | None]] = {
    "a call and its result": ([USER, CALLED, RESULT], None),
    "two results in any order": (
        [USER, {**CALLED, "tool_calls": [CALL, {**CALL, "id": "b"}]}, {**RESULT, "tool_call_id": "b"}, RESULT],
        None,
    ),
    "a result without an id": ([USER, CALLED, {"role": "tool", "content": "1"}], "messages[2].tool_call_id"),
    "a result whose id is null": ([USER, CALLED, {**RESULT, "tool_call_id": None}], "messages[2].tool_call_id"),
    "a result of an unknown call": ([USER, CALLED, {**RESULT, "tool_call_id": "b"}], "messages[2].tool_call_id"),
    "a result before its call": ([USER, RESULT, CALLED], "messages[1].tool_call_id"),
    "a result without any call": ([USER, RESULT], "messages[1].tool_call_id"),
    "a user's null": ([{"role": "user", "content": None}], "messages[0].content"),
    "nothing of a user": ([{"role": "user"}], "messages[0].content"),
    "the system's null": ([{"role": "system", "content": None}, USER], "messages[0].content"),
    "a developer's null": ([{"role": "developer", "content": None}, USER], "messages[0].content"),
    "a tool's null": ([USER, CALLED, {**RESULT, "content": None}], "messages[2].content"),
    "an answer that is null": ([USER, {"role": "assistant", "content": None}], "messages[1].content"),
    "an answer of thoughts": ([USER, {"role": "assistant", "content": None, "reasoning_content": "t"}, USER], None),
    "an empty answer": ([USER, {"role": "assistant", "content": ""}, USER], None),
    "a part that is null": ([{"role": "user", "content": [None]}], "messages[0].content[0]"),
    "a text that is null": (
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        "messages[0].content[0].text",
    ),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(("messages", "param"), TURNS.values(), ids=TURNS)
async def test_turns_that_do_not_go_together_are_named(
    start: Callable[..., Service], thinker: ServedModel, path: str, messages: list[dict[str, Any]], param: str | None
) -> None:
    answer = await start(Role.UNIFIED, served=thinker).http.post(path, json={"model": "tiny", "messages": messages})
    if param is None:
        assert answer.status_code == 200, answer.text
    else:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert param in answer.json()["error"]["message"]


NULLS: dict[str, tuple[dict[str, Any], str]] = {
    "a user's": ({"role": "user", "content": None}, "input[0].content"),
    "an assistant's": ({"role": "assistant", "content": None}, "input[0].content"),
    "an output's": ({"type": "function_call_output", "call_id": "a", "output": None}, "input[0].output"),
    "a role": ({"role": None, "content": "x"}, "input[0].type"),
}


@pytest.mark.parametrize(("item", "param"), NULLS.values(), ids=NULLS)
async def test_nulls_in_items_are_named(service: Service, item: dict[str, Any], param: str) -> None:
    answer = await service.http.post("/v1/responses", json={"model": "tiny", "input": [item]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def optional_fields(service: Service, path: str) -> list[str]:
    """Return the fields of a request that the API's document does not require."""
    document = (await service.http.get("/openapi.json")).json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return [name for name in described["properties"] if name not in described["required"]]


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages"])
async def test_an_optional_field_that_is_null_counts_as_absent(service: Service, path: str) -> None:
    body = BODIES.get(path, {"messages": [USER], "max_tokens": 2})
    nulls = dict.fromkeys(await optional_fields(service, path))
    assert {"ignore_eos", "priority", "skip_special_tokens", "baton_timeline"} <= nulls.keys()
    answer = await service.http.post(path, json={"model": "tiny", **nulls, **body})
    assert answer.status_code == 200, answer.text
    assert "timeline" not in answer.text


async def test_nulls_within_a_field_count_as_absent(service: Service) -> None:
    options = await service.http.get("/openapi.json")
    nulls = dict.fromkeys(options.json()["components"]["schemas"]["StreamOptions"]["properties"])
    assert {"include_usage", "continuous_usage_stats", "resumable"} <= nulls.keys()
    body = {"model": "tiny", "prompt": "hello", "stream": True, "stream_options": nulls}
    answer = await service.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "usage" not in answer.text
    assert "id: " not in answer.text

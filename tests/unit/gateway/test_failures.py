"""Engines die, lose KV and refuse: the client sees one unbroken answer, or one clear error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.engine.core.messages import EngineError, ErrorKind

from ...helpers.fake_cluster import FakeEngine
from ...helpers.gateway_service import Service, events

PROMPT = list(range(20, 60))
FIELDS: dict[str, Any] = {"seed": 11, "max_tokens": 30, "ignore_eos": True}


async def undisturbed(start: Callable[..., Service]) -> str:
    """Return the answer of an engine without failures."""
    response = await start(Role.UNIFIED).complete(PROMPT, **FIELDS)
    return response.json()["choices"][0]["text"]


def text_of(stream: list[Any]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in stream if chunk != "[DONE]")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def refuse(engine: FakeEngine, kind: ErrorKind) -> None:
    engine.refuse = EngineError(kind, f"{kind}!")


@pytest.mark.parametrize(
    "roles",
    [
        [Role.UNIFIED, Role.UNIFIED],
        [Role.PREFILL, Role.DECODE, Role.DECODE],
        [Role.PREFILL, Role.DECODE, Role.UNIFIED],
    ],
)
@pytest.mark.parametrize("after_tokens", [1, 2, 7, 29])
async def test_an_engine_that_dies_in_mid_answer_leaves_no_gap_and_no_repeat(
    start: Callable[..., Service], roles: list[Role], after_tokens: int
) -> None:
    expected = await undisturbed(start)
    service = start(*roles)
    generating = [engine for engine in service.cluster.members if engine.record.role is not Role.PREFILL]

    def spare_the_others() -> None:
        for engine in generating:
            engine.die_after_tokens = None

    for engine in generating:
        engine.die_after_tokens, engine.on_death = after_tokens, spare_the_others
    response = await service.complete(PROMPT, **FIELDS, stream=True)
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert text_of(chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert [engine.alive for engine in generating].count(False) == 1
    await service.cluster.settled()


async def test_requests_wait_for_the_replacement_of_a_dead_engine(start: Callable[..., Service]) -> None:
    expected = await undisturbed(start)
    service = start(Role.PREFILL, Role.DECODE)
    decode = service.cluster.members[1]
    decode.die_after_tokens = 5
    answer = asyncio.create_task(service.complete(PROMPT, **FIELDS, stream=True))
    await until(lambda: not decode.alive)
    await asyncio.sleep(0.05)
    assert not answer.done()
    service.cluster.start(Role.DECODE)
    *chunks, done = events((await answer).text)
    assert (text_of(chunks), done) == (expected, "[DONE]")
    await service.cluster.settled()


async def test_a_leaving_engine_is_asked_once_and_the_request_waits_for_another(start: Callable[..., Service]) -> None:
    expected = await undisturbed(start)
    service = start(Role.UNIFIED)
    (leaving,) = service.cluster.members
    refuse(leaving, ErrorKind.LEAVING)
    answer = asyncio.create_task(service.complete(PROMPT, **FIELDS, stream=True))
    await until(lambda: leaving.submitted)
    await asyncio.sleep(0.05)
    assert not answer.done()
    service.cluster.start(Role.UNIFIED)
    *chunks, done = events((await answer).text)
    assert (text_of(chunks), done) == (expected, "[DONE]")
    assert len(leaving.submitted) == 1


async def test_a_stream_that_no_engine_can_continue_ends_with_an_error_and_no_done(
    start: Callable[..., Service],
) -> None:
    service = start(Role.UNIFIED, capacity_timeout_s=0.1)
    service.cluster.members[0].die_after_tokens = 5
    response = await service.complete(PROMPT, **FIELDS, stream=True)
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert text_of(chunks)
    assert last["error"]["code"] == "no_capacity"
    assert (await service.metrics())['baton_stream_errors_total{status="503"}'] == 1


async def test_without_engines_an_answer_is_refused_with_a_time_to_retry(start: Callable[..., Service]) -> None:
    service = start(capacity_timeout_s=0.1)
    response = await service.complete("hello")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "no_capacity"


async def test_a_prefill_engine_that_dies_before_its_token_is_replaced_by_another(
    start: Callable[..., Service],
) -> None:
    expected = await undisturbed(start)
    service = start(Role.PREFILL, Role.PREFILL, Role.DECODE)
    *prefills, _ = service.cluster.members
    for engine in prefills:
        engine.running.clear()
    answer = asyncio.create_task(service.complete(PROMPT, **FIELDS))
    await until(lambda: any(engine.submitted for engine in prefills))
    victim, other = sorted(prefills, key=lambda engine: not engine.submitted)
    victim.die()
    other.running.set()
    response = await answer
    assert response.json()["choices"][0]["text"] == expected
    assert response.headers["x-baton-path"] == "recomputed; reason=engine-gone; rung=other-prefill"
    (request,) = other.submitted
    assert request.generation == 1
    await service.cluster.settled()


async def test_kv_that_is_lost_is_computed_by_another_prefill_engine(start: Callable[..., Service]) -> None:
    expected = await undisturbed(start)
    service = start(Role.PREFILL, Role.PREFILL, Role.DECODE)
    service.cluster.wire.lose = 1
    response = await service.complete(PROMPT, **FIELDS)
    assert response.json()["choices"][0]["text"] == expected
    assert response.headers["x-baton-path"] == "recomputed; reason=kv-lost; rung=other-prefill"
    first, second, _ = service.cluster.members
    assert (len(first.submitted), len(second.submitted)) == (1, 1)
    again = next(request for request in (*first.submitted, *second.submitted) if request.generation == 1)
    assert again.keep_kv
    assert len(again.output_token_ids) == 1
    await service.cluster.settled()


async def test_lost_kv_is_computed_on_the_decode_engine_without_another_prefill_engine(
    start: Callable[..., Service],
) -> None:
    expected = await undisturbed(start)
    service = start(Role.PREFILL, Role.DECODE)
    service.cluster.wire.lose = 1
    response = await service.complete(PROMPT, **FIELDS, stream=True)
    *chunks, done = events(response.text)
    assert (text_of(chunks), done) == (expected, "[DONE]")
    assert response.headers["x-baton-path"].startswith("disaggregated; ")  # the header was sent before the failure
    assert service.cluster.members[1].submitted[-1].kv_source is None
    await service.cluster.settled()
    path = 'baton_requests_by_path_total{path="recomputed",reason="kv-lost"}'
    assert (await service.metrics())[path] == 1


async def test_a_prefill_too_long_for_the_decode_engine_goes_to_the_same_prefill_engine_again(
    start: Callable[..., Service],
) -> None:
    expected = await undisturbed(start)
    service = start(Role.PREFILL, Role.DECODE, local_prefill_max_tokens=16)
    service.cluster.wire.lose = 1
    response = await service.complete(PROMPT, **FIELDS)
    assert response.json()["choices"][0]["text"] == expected
    assert len(service.cluster.members[0].submitted) == 2
    await service.cluster.settled()


async def test_transfers_that_always_fail_end_in_a_clear_error(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE, local_prefill_max_tokens=0, max_attempts=3)
    service.cluster.wire.lose = 100
    response = await service.complete(PROMPT, **FIELDS)
    assert response.status_code == 503
    assert len(service.cluster.members[0].submitted) == 3
    await service.cluster.settled()


async def test_a_request_that_a_full_engine_refuses_goes_to_another(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, Role.UNIFIED)
    refuse(service.cluster.members[0], ErrorKind.OVERLOADED)
    for _ in range(8):
        assert (await service.complete("hello", max_tokens=2)).status_code == 200
    assert service.cluster.members[0].submitted


async def test_when_all_engines_are_full_the_client_gets_an_error_at_once(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, Role.UNIFIED, capacity_timeout_s=60)
    for engine in service.cluster.members:
        refuse(engine, ErrorKind.OVERLOADED)
    response = await asyncio.wait_for(service.complete("hello"), 30)
    assert response.status_code == 503
    assert response.headers["retry-after"]


@pytest.mark.parametrize(
    ("kind", "status", "attempts"),
    [(ErrorKind.INVALID, 400, 1), (ErrorKind.TOO_LONG, 413, 1), (ErrorKind.INTERNAL, 500, 2)],
)
async def test_errors_that_every_engine_would_return_are_not_retried(
    start: Callable[..., Service], kind: ErrorKind, status: int, attempts: int
) -> None:
    service = start(Role.UNIFIED, Role.UNIFIED, Role.UNIFIED)
    for engine in service.cluster.members:
        refuse(engine, kind)
    response = await service.complete("hello")
    assert response.status_code == status
    assert (f"{kind}!" in response.json()["error"]["message"]) is (status < 500)
    assert sum(len(engine.submitted) for engine in service.cluster.members) == attempts


async def test_requests_beside_one_that_kills_their_engine_are_served_elsewhere(start: Callable[..., Service]) -> None:
    expected = await undisturbed(start)
    service = start(Role.UNIFIED, Role.UNIFIED)
    answers = [asyncio.create_task(service.complete(PROMPT, **FIELDS)) for _ in range(4)]
    await until(lambda: service.cluster.members[0].submitted)
    service.cluster.members[0].runner.explode = True
    assert {(await answer).json()["choices"][0]["text"] for answer in answers} == {expected}


async def test_a_request_that_kills_engines_does_not_kill_them_all(start: Callable[..., Service]) -> None:
    service = start(*[Role.UNIFIED] * 6, max_attempts=3)
    for engine in service.cluster.members:
        engine.die_after_tokens = 1
    response = await service.complete(PROMPT, **FIELDS)
    assert response.status_code == 503
    assert sum(engine.alive for engine in service.cluster.members) == 3


async def test_without_prefill_engines_a_decode_engine_prefills_short_prompts(
    start: Callable[..., Service],
) -> None:
    service = start(Role.DECODE, local_prefill_max_tokens=40, capacity_timeout_s=0.1)
    response = await service.complete([5] * 40, max_tokens=2)
    assert response.headers["x-baton-path"] == "local-prefill; reason=no-prefill-engine"
    assert (await service.complete([6] * 41, max_tokens=2)).status_code == 503


async def test_engines_whose_kv_differs_are_not_paired(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL)
    service.cluster.start(Role.DECODE, fingerprint="another")
    response = await service.complete("hello", max_tokens=2)
    assert response.headers["x-baton-path"].startswith("local-prefill")


async def test_prompt_logprobs_survive_a_retry_and_are_returned_once(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.PREFILL, Role.DECODE)
    service.cluster.wire.lose = 1
    response = await service.complete(PROMPT, **FIELDS, prompt_logprobs=1)
    assert len(response.json()["choices"][0]["prompt_logprobs"]) == len(PROMPT)
    asked = [request.sampling.prompt_logprobs for engine in service.cluster.members for request in engine.submitted]
    assert sorted(asked, key=str) == [1, *[None] * (len(asked) - 1)], (
        "the second engine need not compute prompt logprobs again"
    )
    assert len(asked) == 4


async def test_a_request_that_takes_too_long_is_aborted(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, request_timeout_s=0.2)
    engine = service.cluster.members[0]
    engine.running.clear()
    response = await service.complete("hello")
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "request_timeout"
    engine.running.set()
    await service.cluster.settled()
    engine.step_s = 0.05
    *_, last = events((await service.complete(PROMPT, **FIELDS, stream=True)).text)
    assert last["error"]["code"] == "request_timeout"
    await service.cluster.settled()

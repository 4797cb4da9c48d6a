"""Early hand-offs: the decode engine reads a prompt's blocks while prefill still runs, and the answer is unchanged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.engine.core.connector import OfferOutcome

from ...helpers.fake_cluster import FakeEngine
from ...helpers.gateway_service import Service, until

PROMPT = list(range(20, 60)) * 4
FIELDS: dict[str, Any] = {"seed": 11, "max_tokens": 12, "ignore_eos": True}
CHUNK = 32


@pytest.fixture
async def expected(start: Callable[..., Service]) -> str:
    response = await start(Role.UNIFIED).complete(PROMPT, **FIELDS)
    return response.json()["choices"][0]["text"]


@pytest.fixture
async def service(start: Callable[..., Service]) -> AsyncIterator[Service]:
    """A service with two prefill engines that need five steps for the prompt, and two decode engines."""
    service = start()
    service.cluster.wire.progressive = True
    for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE):
        service.cluster.start(role, max_num_batched_tokens=CHUNK)
    yield service
    await service.cluster.settled()


def members(service: Service, role: Role) -> list[FakeEngine]:
    return [engine for engine in service.cluster.members if engine.record.role is role]


async def in_mid_prefill(service: Service) -> tuple[asyncio.Task, FakeEngine, FakeEngine]:
    """Return an answer, its prefill engine, paused after a step or two, and the decode engine that waits for it."""
    for engine in members(service, Role.PREFILL):
        engine.step_s = 0.02
    answer = asyncio.create_task(service.complete(PROMPT, **FIELDS))
    await until(lambda: any(engine.submitted for engine in members(service, Role.DECODE)))
    (prefill,) = (engine for engine in members(service, Role.PREFILL) if engine.submitted)
    (decode,) = (engine for engine in members(service, Role.DECODE) if engine.submitted)
    prefill.running.clear()
    assert prefill.streams, "the prefill ended too soon for this test"
    return answer, prefill, decode


async def test_the_decode_engine_is_chosen_during_prefill_and_continues_from_the_first_token(
    service: Service, expected: str
) -> None:
    answer, prefill, decode = await in_mid_prefill(service)
    (early,) = decode.submitted
    assert (early.awaits_first_token, early.output_token_ids) == (True, [])
    assert early.kv_source.num_tokens == len(PROMPT)
    await until(lambda: decode.stats.num_requests_waiting_for_kv == 1)
    prefill.running.set()
    response = await answer
    assert response.json()["choices"][0]["text"] == expected
    assert response.headers["x-baton-path"].startswith("disaggregated; ")
    assert [(engine, len(decode.submitted)) for engine, _, _ in service.cluster.begun] == [(decode.record.engine_id, 1)]


async def test_short_prompts_are_handed_over_after_prefill(service: Service) -> None:
    await service.complete(PROMPT[:CHUNK], **FIELDS)
    (request,) = (request for engine in members(service, Role.DECODE) for request in engine.submitted)
    assert not request.awaits_first_token
    assert service.cluster.begun == []


async def test_the_early_attempt_ends_with_its_prefill_engine(service: Service, expected: str) -> None:
    answer, prefill, _ = await in_mid_prefill(service)
    prefill.die()
    response = await answer
    assert response.json()["choices"][0]["text"] == expected
    assert response.headers["x-baton-path"].startswith("recomputed; ")


async def test_a_decode_engine_that_dies_during_prefill_is_replaced(service: Service, expected: str) -> None:
    answer, prefill, decode = await in_mid_prefill(service)
    decode.die()
    prefill.running.set()
    assert (await answer).json()["choices"][0]["text"] == expected


async def test_an_early_offer_that_ends_is_made_again_and_the_early_attempt_dropped(
    service: Service, expected: str
) -> None:
    """The offer ends as it does after a preemption or a failed read."""
    answer, prefill, decode = await in_mid_prefill(service)
    ((_, offer),) = service.cluster.wire.offers.items()
    prefill.connector.end(offer.transfer_id, OfferOutcome.WITHDRAWN)
    prefill.running.set()
    response = await answer
    assert response.json()["choices"][0]["text"] == expected
    assert response.headers["x-baton-path"].startswith("disaggregated; ")
    assert service.cluster.begun == []
    requests = [request for engine in members(service, Role.DECODE) for request in engine.submitted]
    requests.sort(key=lambda request: request.generation)
    assert [request.awaits_first_token for request in requests] == [True, False]
    assert decode.submitted


async def test_a_client_that_leaves_during_prefill_ends_every_attempt(service: Service) -> None:
    answer, prefill, _ = await in_mid_prefill(service)
    answer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answer
    prefill.running.set()
    await service.cluster.settled()
    assert not [engine for engine in service.cluster.members if engine.streams]


async def test_an_answer_of_one_token_needs_no_decode_engine_in_the_end(service: Service) -> None:
    response = await service.complete(PROMPT, **{**FIELDS, "max_tokens": 1})
    assert response.json()["usage"]["completion_tokens"] == 1
    assert service.cluster.begun == []


@pytest.mark.parametrize("number", [2, 6])
async def test_many_at_once_are_all_answered_right(service: Service, number: int, expected: str) -> None:
    answers = await asyncio.gather(*(service.complete(PROMPT, **FIELDS) for _ in range(number)))
    assert {response.json()["choices"][0]["text"] for response in answers} == {expected}

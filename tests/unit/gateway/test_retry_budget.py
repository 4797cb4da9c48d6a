"""The retry budget limits the further attempts of a gateway, counted over the last seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.contracts import Role
from baton.cluster.gateway.routing.sliding_window import PARTS, SlidingWindow
from baton.cluster.gateway.serving.retry_policy import BUDGET_WINDOW_S, RetryBudget
from baton.engine.core.messages import EngineError, ErrorKind

from ...helpers.gateway_service import Clock, Service


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.floats(0.0, 7.0))))
def test_a_window_counts_what_happened_within_it(steps: list[tuple[int, int, float]]) -> None:
    """The count is exact to within one part of the window."""
    clock, seconds = Clock(), 10.0
    window = SlidingWindow(seconds, clock)
    past: list[tuple[float, int, int]] = []
    for kind, count, pause_s in steps:
        window.add(kind, count)
        past.append((clock.now_s, kind, count))
        clock.now_s += pause_s
        for each in (0, 1):
            newer = sum(n for at, k, n in past if k == each and at > clock.now_s - seconds * (1 - 1 / PARTS))
            older = sum(n for at, k, n in past if k == each and at >= clock.now_s - seconds)
            assert newer <= window.count(each) <= older
        assert window.num_parts <= PARTS


def test_a_window_is_empty_after_it_was_cleared() -> None:
    window = SlidingWindow(10.0, Clock())
    window.add(0, 5)
    window.clear()
    assert (window.count(0), window.count(1)) == (0, 0)


def test_the_budget_is_a_share_of_the_requests_that_began_or_run() -> None:
    clock = Clock()
    budget = RetryBudget(0.2, 3, clock)
    assert budget.left == 3, "the minimum must be left without any request"
    for _ in range(50):
        budget.began()
    assert budget.left == 10
    clock.now_s += 2 * BUDGET_WINDOW_S
    assert budget.left == 10, "running requests must count"
    for _ in range(50):
        budget.ended()
    assert budget.left == 3


def test_spent_attempts_are_restored_after_the_window() -> None:
    clock = Clock()
    budget = RetryBudget(0.0, 2, clock)
    budget.spend()
    budget.spend()
    assert budget.left == 0
    clock.now_s += BUDGET_WINDOW_S * 1.01
    assert budget.left == 2


FIELDS: dict[str, Any] = {"max_tokens": 2}


async def test_a_gateway_whose_budget_is_spent_makes_no_further_attempts_and_says_so(
    start: Callable[..., Service],
) -> None:
    service = start(
        Role.UNIFIED,
        Role.UNIFIED,
        retry_budget=0.0,
        retry_budget_min=3,
        max_attempts=9,
        capacity_timeout_s=0.1,
        breaker={"failures": 1000},
    )
    for engine in service.cluster.members:
        engine.refuse = EngineError(ErrorKind.ENGINE_DEAD, "died")
    responses = [await service.complete("hello", **FIELDS) for _ in range(5)]
    assert {response.status_code for response in responses} == {503}
    assert {response.json()["error"]["code"] for response in responses} == {"retry_budget_exhausted"}
    assert all(int(response.headers["retry-after"]) >= 1 for response in responses)
    assert sum(len(engine.submitted) for engine in service.cluster.members) == 5 * 2 + 3, (
        "each request's first retry must cost nothing"
    )


async def test_retries_of_overloaded_engines_cost_budget_from_the_first_on(start: Callable[..., Service]) -> None:
    service = start(*[Role.UNIFIED] * 3, retry_budget=0.0, retry_budget_min=2, capacity_timeout_s=0.1)
    for engine in service.cluster.members:
        engine.refuse = EngineError(ErrorKind.OVERLOADED, "full")
    codes = [(await service.complete("hello", **FIELDS)).json()["error"]["code"] for _ in range(3)]
    assert codes == ["engines_full", "retry_budget_exhausted", "retry_budget_exhausted"]
    assert sum(len(engine.submitted) for engine in service.cluster.members) == 3 + 1 + 1


async def test_a_retry_is_paid_once_although_its_answer_is_handed_over(start: Callable[..., Service]) -> None:
    budget = {"retry_budget": 0.0, "retry_budget_min": 1}
    service = start(Role.PREFILL, Role.DECODE, **budget, capacity_timeout_s=0.5, local_prefill_max_tokens=0)
    lost = [EngineError(ErrorKind.KV_LOST, "no link")]
    service.cluster.fault = lambda engine, request: lost.pop() if lost and request.kv_source is not None else None
    response = await service.complete(list(range(5, 50)), max_tokens=6, ignore_eos=True)
    assert response.status_code == 200, response.text
    assert not lost
    assert [len(engine.submitted) for engine in service.cluster.members] == [2, 2]


async def test_a_request_that_waits_for_the_budget_continues_once_there_is_some(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start(Role.UNIFIED, Role.UNIFIED, retry_budget=0.0, retry_budget_min=0, capacity_timeout_s=20)
    for engine in service.cluster.members:
        engine.refuse = EngineError(ErrorKind.OVERLOADED, "full")
    answer = asyncio.create_task(service.complete("hello", **FIELDS))
    async with asyncio.timeout(20):
        while not any(engine.submitted for engine in service.cluster.members):
            await asyncio.sleep(0.001)
    for engine in service.cluster.members:
        engine.refuse = None
    await asyncio.sleep(0.1)
    assert not answer.done()
    monkeypatch.setattr(RetryBudget, "left", 1)
    assert (await answer).status_code == 200

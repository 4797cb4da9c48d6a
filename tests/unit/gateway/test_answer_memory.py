"""The gateway buffers answers that are not streamed, within the memory budget that all requests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.bodies.budget import SMALL_ANSWER_BYTES, MemoryBudget
from baton.cluster.gateway.errors import ApiError

from ...helpers.gateway_service import Service

MIB = 2**20
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 20},
    "/v1/completions": {"prompt": "hello", "logprobs": 20},
}


async def ask(service: Service, route: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 200, "ignore_eos": True, "temperature": 0, **ROUTES[route], **fields}
    return await service.http.post(route, json=body)


def held_bytes(service: Service) -> int:
    return service.bodies.budget.held_bytes


@pytest.mark.parametrize("route", ROUTES)
async def test_one_answer_may_hold_a_quarter_of_the_memory_and_a_stream_holds_nothing(
    start: Callable[..., Service], route: str
) -> None:
    service = start(Role.UNIFIED, request_memory_bytes=4 * MIB)
    refused = await ask(service, route, n=4)  # 800 tokens with 21 values each
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "answer_too_large", None)
    assert "'stream'" in error["message"]
    streamed = await ask(service, route, n=4, stream=True)
    assert streamed.status_code == 200
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert (await ask(service, route)).status_code == 200
    assert held_bytes(service) == 0
    assert not service.cluster.members[0].core.has_work(), "a refused request must be aborted"


async def test_large_answers_share_a_quarter_of_the_memory(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, request_memory_bytes=8 * MIB)
    large = [ask(service, "/v1/completions", n=3) for _ in range(2)]  # 1.4 MB each
    small = [ask(service, "/v1/completions", logprobs=None) for _ in range(4)]
    answers = await asyncio.gather(*large, *small)
    assert sorted(answer.status_code for answer in answers[:2]) == [200, 503]
    (refused,) = (answer for answer in answers[:2] if answer.status_code == 503)
    error = refused.json()["error"]
    assert (error["code"], error["gpu_time_spent"]) == ("memory_full", True)
    assert int(refused.headers["retry-after"]) >= 1
    assert {answer.status_code for answer in answers[2:]} == {200}
    assert held_bytes(service) == 0


@pytest.mark.slow
async def test_answers_without_log_probabilities_hold_little(start: Callable[..., Service]) -> None:
    """The gateway joins their deltas as they arrive, so that many long answers fit."""
    service = start(Role.UNIFIED, request_memory_bytes=MIB)
    answers = await asyncio.gather(*(ask(service, "/v1/completions", logprobs=None, n=16) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}


def test_small_answers_are_bounded_by_the_whole_budget() -> None:
    budget = MemoryBudget(10 * SMALL_ANSWER_BYTES)
    held = [budget.reservation() for _ in range(11)]
    for each in held[:10]:
        each.add_answer(SMALL_ANSWER_BYTES)
    with pytest.raises(ApiError) as refused:
        held[10].add_answer(1)
    assert (refused.value.status, refused.value.code) == (503, "memory_full")
    held[0].release()
    held[10].add_answer(SMALL_ANSWER_BYTES)

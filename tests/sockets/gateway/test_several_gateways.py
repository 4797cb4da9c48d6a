"""Several gateways without knowledge of each other, and restarted gateways, share the same engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.settings import QueueLimits
from baton.engine.core.messages import EngineOutput, EngineRequest, ErrorKind, KVSource
from baton.engine.core.sampling import SamplingParams

from ...helpers.gateway_service import until
from .zmq_fleet import WiredEngine, WiredFleet, WiredGateway

pytestmark = pytest.mark.timeout(60)

P, D, U = Role.PREFILL, Role.DECODE, Role.UNIFIED
PROMPT = list(range(20, 100))


@pytest.fixture
def start() -> Iterator[Callable[..., WiredFleet]]:
    """Return a function that starts a fleet: `start(Role.PREFILL, Role.DECODE, limits=...)`."""
    fleets: list[WiredFleet] = []

    def start_fleet(*roles: Role, **options: Any) -> WiredFleet:
        fleets.append(WiredFleet(*roles, **options))
        return fleets[-1]

    yield start_fleet
    for fleet in fleets:
        fleet.close()


def users(fleet: WiredFleet, prompt: list[int]) -> list[str]:
    """Return the ids of the engines that got a request with this prompt, by rank."""
    return [
        engine.record.engine_id
        for engine in fleet.engines
        if any(request.prompt_token_ids == prompt for request in engine.taken)
    ]


async def test_engines_bound_a_burst_from_independent_gateways(
    start: Callable[..., WiredFleet],
) -> None:
    """All requests are sent before an engine can report its queue."""
    limits = QueueLimits(requests=3)
    fleet = start(U, U, limits=limits)
    async with fleet.gateway("one") as one, fleet.gateway("other") as other:
        for engine in fleet.engines:
            engine.runs.clear()
            await engine.hang()
        burst = [
            asyncio.create_task(gateway.complete([*PROMPT, index])) for index in range(20) for gateway in (one, other)
        ]
        await until(lambda: sum(engine.num_unheard for engine in fleet.engines) == len(burst))
        for engine in fleet.engines:
            engine.moves.set()
        await until(lambda: sum(answer.done() for answer in burst) == len(burst) - 2 * limits.requests)
        for answer in burst:
            if answer.done():
                response = answer.result()
                error = response.json()["error"]
                assert (response.status_code, error["code"], error["gpu_time_spent"]) == (503, "engines_full", False)
                assert int(response.headers["retry-after"]) >= 1
        assert [engine.stats().num_requests_waiting for engine in fleet.engines] == [limits.requests] * 2
        for engine in fleet.engines:
            engine.runs.set()
            engine.server.wake()
        codes = [answer.status_code for answer in await asyncio.gather(*burst)]
        assert codes.count(200) == 2 * limits.requests
        assert all(engine.stats().prompt_tokens <= 3 * (len(PROMPT) + 1) for engine in fleet.engines)


async def test_a_request_that_one_engine_refuses_is_served_by_another(start: Callable[..., WiredFleet]) -> None:
    fleet = start(U, U, limits=QueueLimits(requests=1))
    async with fleet.gateway("one") as gateway:
        first, second = fleet.engines
        first.runs.clear()
        await first.hang()  # its last status shows no waiting request
        pinned = [
            asyncio.create_task(gateway.http.post("/v1/completions", json=body(index), headers=pin(first)))
            for index in range(3)
        ]
        await until(lambda: first.num_unheard == 3)
        home = next(name for name in map(str, range(99)) if home_of(fleet, gateway, name) is first)
        guest = asyncio.create_task(gateway.complete([7] * 9, home))
        await until(lambda: first.num_unheard == 4)
        first.moves.set()
        response = await guest
        assert response.status_code == 200
        assert response.headers["x-baton-path"] == "recomputed; reason=overloaded; rung=unified"
        assert users(fleet, [7] * 9) == [second.record.engine_id]
        first.runs.set()
        first.server.wake()
        assert sorted([(await answer).status_code for answer in pinned]) == [200, 503, 503]


def body(index: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": [index] * 30, "max_tokens": 2, "ignore_eos": True}


def pin(engine: WiredEngine) -> dict[str, str]:
    return {"x-data-parallel-rank": str(engine.record.rank)}


def home_of(fleet: WiredFleet, gateway: WiredGateway, session_id: str) -> WiredEngine:
    from baton.cluster.gateway.routing.rates import CostRates, LearntRates
    from baton.cluster.gateway.routing.router import Router

    rates = LearntRates(CostRates(), time.monotonic)
    router = Router("any", rates=rates, session_patience_s=10.0, local_prefill_max_tokens=0)
    request = EngineRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams())
    route = router.route(gateway.client.engines(), router.query(request, session_id=session_id))
    assert route is not None
    return fleet.engines[route.placement.engine.rank]


def asked(name: str, **fields: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=[9] * 40, sampling=SamplingParams(max_tokens=2), **fields)


async def test_queue_limits_count_tokens_and_do_not_apply_to_continued_requests(
    start: Callable[..., WiredFleet],
) -> None:
    fleet = start(D, limits=QueueLimits(tokens=50))
    (engine,) = fleet.engines
    async with fleet.gateway("one") as gateway:
        engine.runs.clear()
        submit = gateway.client.submit

        async def first_output(request: EngineRequest) -> EngineOutput:
            return await asyncio.wait_for(anext(submit(engine.record, request)), 5)

        waiting = [submit(engine.record, asked(name, cache_salt=name)) for name in ("a", "b")]
        refusal = await first_output(asked("c"))
        assert refusal.error is not None
        assert refusal.error.kind is ErrorKind.OVERLOADED
        assert "2 requests waiting, with 80 tokens" in refusal.error.message
        assert "gateway.queue_limits are 1024 and 50" in refusal.error.message
        begun = [
            submit(engine.record, asked("d", output_token_ids=[3])),
            submit(engine.record, asked("e", kv_source=KVSource(b"nowhere", 40), output_token_ids=[3])),
        ]
        await until(lambda: [request.request_id for request in engine.taken] == ["a", "b", "d", "e"])
        for stream in (*waiting, *begun):
            await stream.aclose()
        await until(lambda: engine.stats().num_waiting_tokens == 0)
        taken = submit(engine.record, asked("f"))
        await until(lambda: engine.taken[-1].request_id == "f")
        await taken.aclose()


async def test_a_new_gateway_learns_the_cached_blocks_from_the_engines(
    start: Callable[..., WiredFleet],
) -> None:
    fleet = start(*[U] * 4)
    prompts = [[index, *PROMPT] for index in range(6)]
    async with fleet.gateway("one") as gateway:
        for prompt in prompts:
            await gateway.hear_that_all_are_idle()
            assert (await gateway.complete(prompt)).headers["x-baton-path"] == "unified; reason=least-loaded"
    homes = [users(fleet, prompt) for prompt in prompts]
    assert len(set(map(tuple, homes))) > 1, "the prompts must not all be in one engine"
    async with fleet.gateway("one") as again, fleet.gateway("other") as other:
        for gateway, last in {again: 5, other: 6}.items():
            for prompt, home in zip(prompts, homes, strict=True):
                longer = [*prompt, last]
                await gateway.hear_that_all_are_idle()
                assert (await gateway.complete(longer)).headers["x-baton-path"] == "unified; reason=prefix-hit"
                assert users(fleet, longer) == home


async def test_a_session_reaches_the_same_pair_through_any_gateway_and_after_a_restart(
    start: Callable[..., WiredFleet],
) -> None:
    fleet = start(*[P] * 3, *[D] * 3)
    sessions = [f"session-{index}" for index in range(6)]
    pairs: dict[str, set[tuple[str, ...]]] = {name: set() for name in sessions}

    async def turn(gateway: WiredGateway, number: int) -> None:
        for index, name in enumerate(sessions):
            prompt = [number, index] * 30
            await gateway.hear_that_all_are_idle()
            response = await gateway.complete(prompt, name)
            assert response.headers["x-baton-path"].startswith("disaggregated")
            pairs[name].add(tuple(users(fleet, prompt)))

    async with fleet.gateway("one") as one, fleet.gateway("other") as other:
        await turn(one, 1)
        await turn(other, 2)
    async with fleet.gateway("one") as again:
        await turn(again, 3)
    assert all(len(its) == 1 for its in pairs.values()), pairs
    assert all(len(pair) == 2 for its in pairs.values() for pair in its), (
        "each turn must use a prefill and a decode engine"
    )
    assert len({pair for its in pairs.values() for pair in its}) > 2, "sessions must use different pairs"


async def test_an_idle_engine_that_gets_work_reports_it_to_other_gateways(
    start: Callable[..., WiredFleet],
) -> None:
    """The engine must report before its step, which may be long, or other gateways would send it the next prompt."""
    fleet = start(U)
    (engine,) = fleet.engines
    async with fleet.gateway("one") as one, fleet.gateway("other") as other:
        await one.complete([1])
        await until(lambda: other.client.engines()[0].stats.num_steps > 0)
        engine.hangs_at_work = True
        answer = asyncio.create_task(one.complete(PROMPT))
        await until(lambda: other.client.engines()[0].stats.num_waiting_tokens == len(PROMPT))
        await until(lambda: not engine.moves.is_set())  # the engine has reached its step
        engine.moves.set()
        assert (await answer).status_code == 200

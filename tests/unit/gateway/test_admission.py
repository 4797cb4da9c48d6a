"""The gateway admits requests up to its limits; a refusal says when to retry, and whether it has cost GPU time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.errors import ApiError
from baton.cluster.gateway.routing.load import Placement
from baton.cluster.gateway.routing.rates import RENEWED_S, CostRates, LearntRates
from baton.cluster.gateway.serving.admission import MAX_RETRY_S, WINDOW_S, AdmissionControl
from baton.cluster.gateway.serving.attempt import Attempt
from baton.cluster.gateway.settings import GatewaySettings, QueueLimits
from baton.engine.core.messages import EngineError, EngineRequest, ErrorKind
from baton.engine.core.pace import Line, StepTimes

from ...helpers.fake_cluster import FakeEngine
from ...helpers.gateway_service import Clock, Service, events, until
from .engine_views import view

BODY: dict[str, Any] = {"model": "tiny", "prompt": list(range(20, 60)), "max_tokens": 4}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def admission_of(settings: GatewaySettings, clock: Clock) -> AdmissionControl:
    return AdmissionControl(settings, LearntRates(settings.cost, clock), clock)


def refused(admission: AdmissionControl, key: bytes | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught, admission.admit(key):
        pass
    return caught.value


def test_the_number_of_requests_in_flight_is_limited(clock: Clock) -> None:
    admission = admission_of(GatewaySettings(max_inflight_requests=1), clock)
    with admission.admit(None):
        error = refused(admission)
        assert (error.status, error.code, error.gpu_time_spent) == (429, "queue_full", False)
    with admission.admit(None):
        assert admission.num_inflight == 1


def test_the_limit_of_one_key_leaves_capacity_for_other_keys(clock: Clock) -> None:
    admission = admission_of(GatewaySettings(max_inflight_per_key=1), clock)
    with admission.admit(b"a"), admission.admit(b"b"):
        error = refused(admission, b"a")
        assert (error.status, error.code) == (429, "key_limit")
    with admission.admit(b"a"):
        pass
    assert admission.num_keys == 0, "the gateway must keep no state for keys without requests"


def test_retry_after_follows_from_earlier_refusals_and_the_recent_completion_rate(clock: Clock) -> None:
    admission = admission_of(GatewaySettings(max_inflight_requests=2), clock)

    def waits_s() -> float:
        return float(refused(admission).headers["retry-after"])

    for _ in range(20):  # 2 a second
        with admission.admit(None):
            pass
    with admission.admit(None), admission.admit(None):
        assert [waits_s() for _ in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]
        clock.now_s += 2 * WINDOW_S
        assert [waits_s() for _ in range(3)] == [10, 20, 30], "no request ended recently"
        assert {waits_s() for _ in range(9)} == {40, 50, MAX_RETRY_S}


def waits_s(admission: AdmissionControl, tokens: list[int]) -> float:
    """Return the `Retry-After` in seconds when so many tokens wait in each unified engine."""
    engines = [view(rank, num_waiting_tokens=count, num_requests_waiting=9) for rank, count in enumerate(tokens)]
    with pytest.raises(ApiError) as caught:
        admission.check_engines(engines)
    assert (caught.value.status, caught.value.code) == (503, "engines_full")
    return float(caught.value.headers["retry-after"])


def test_retry_after_of_full_engines_is_the_time_of_the_shortest_queue(clock: Clock) -> None:
    settings = GatewaySettings(queue_limits=QueueLimits(tokens=10_000), cost={"prefill_tokens_per_s": 1000.0})
    admission = admission_of(settings, clock)
    assert [waits_s(admission, [tokens]) for tokens in (10_000, 25_000, 40_000, 9_000_000)] == [10, 25, 40, 60]
    assert waits_s(admission, [40_000, 12_000, 30_000]) == 12


def test_a_request_is_admitted_if_one_engine_has_capacity(clock: Clock) -> None:
    admission = admission_of(GatewaySettings(queue_limits=QueueLimits(requests=2)), clock)
    admission.check_engines([view(0, num_requests_waiting=2), view(1, num_requests_waiting=1)])
    admission.check_engines([])
    with pytest.raises(ApiError):
        admission.check_engines([view(0, Role.PREFILL, num_requests_waiting=2), view(1, Role.DECODE)])


def test_the_time_of_a_queue_follows_from_what_its_engine_measured(clock: Clock) -> None:
    admission = admission_of(GatewaySettings(cost=CostRates(prefill_tokens_per_s=1000.0)), clock)
    engine = view(0, num_waiting_tokens=6000, num_requests_waiting=3)
    assert admission.retry_after_s([engine]) == 6.0, "the engine has measured no prefill yet"
    clock.now_s += RENEWED_S
    measured = view(0, num_waiting_tokens=6000, num_requests_waiting=3, step_times=StepTimes(Line(0.0, 1 / 3000)))
    assert admission.retry_after_s([measured]) == 2.0
    busy = view(1, num_waiting_tokens=9000, step_times=StepTimes(Line(0.0, 1 / 3000)))
    clock.now_s += RENEWED_S
    assert admission_of(GatewaySettings(), clock).retry_after_s([engine, busy]) == 2.0, "what others measured counts"


async def post(service: Service, key: str) -> httpx.Response:
    return await service.http.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"})


async def test_a_client_at_its_limit_gets_a_429_and_other_clients_are_served(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=["a", "b"], max_inflight_per_key=2)
    engine = service.cluster.members[0]
    engine.running.clear()
    first = [asyncio.create_task(post(service, "a")) for _ in range(2)]
    await until(lambda: len(engine.submitted) == 2)
    third, others = await post(service, "a"), asyncio.create_task(post(service, "b"))
    error = third.json()["error"]
    assert (third.status_code, error["code"], error["type"]) == (429, "key_limit", "rate_limit_error")
    assert error["gpu_time_spent"] is False
    assert int(third.headers["retry-after"]) >= 1
    engine.running.set()
    assert {(await answer).status_code for answer in (*first, others)} == {200}
    assert (await post(service, "a")).status_code == 200


async def test_full_engines_get_no_more_requests_and_retry_after_grows_with_their_queue(
    start: Callable[..., Service],
) -> None:
    limits = {"queue_limits": {"requests": 3}, "cost": {"prefill_tokens_per_s": 40.0}}
    service = start(Role.PREFILL, Role.PREFILL, Role.DECODE, **limits)
    prefills = service.cluster.members[:2]
    for engine in prefills:
        engine.running.clear()
    answers: list[asyncio.Task[httpx.Response]] = []
    told_s = []
    for _ in range(2):
        for _ in range(24):
            answers.append(asyncio.create_task(service.complete(BODY["prompt"], max_tokens=4)))
            await asyncio.sleep(0.01)
        *_, last = answers
        response = await asyncio.wait_for(last, 20)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["gpu_time_spent"]) == (503, "engines_full", False)
        told_s.append(int(response.headers["retry-after"]))
        assert all(engine.stats.num_requests_waiting >= 3 for engine in prefills)
        assert len(answers) > sum(len(engine.submitted) for engine in prefills)
        waiting = min(engine.stats.num_waiting_tokens for engine in prefills)
        assert told_s[-1] == -(-waiting // 40)
        for engine in prefills:  # requests of other gateways
            for number in range(3):
                name = f"other-{engine.record.rank}-{number}"
                sampling = engine.submitted[0].sampling
                engine.core.add(EngineRequest(request_id=name, prompt_token_ids=[7] * 60, sampling=sampling))
    assert told_s[1] > told_s[0]
    for engine in prefills:
        engine.running.set()
    codes = [(await answer).status_code for answer in answers]
    assert set(codes) == {200, 503}


def refuse_with(service: Service, kind: ErrorKind, role: Role) -> None:
    def fault(engine: FakeEngine, request: EngineRequest) -> EngineError | None:
        return EngineError(kind, f"{kind}!") if engine.record.role is role else None

    service.cluster.fault = fault


@pytest.mark.parametrize(
    ("roles", "kind", "at", "status", "spent"),
    [
        ([], None, None, 503, False),
        ([Role.UNIFIED], ErrorKind.OVERLOADED, Role.UNIFIED, 503, False),
        ([Role.PREFILL, Role.DECODE], ErrorKind.OVERLOADED, Role.PREFILL, 503, False),
        ([Role.PREFILL, Role.DECODE], ErrorKind.OVERLOADED, Role.DECODE, 503, True),
        ([Role.PREFILL, Role.DECODE], ErrorKind.KV_LOST, Role.DECODE, 503, True),
        ([Role.UNIFIED], ErrorKind.ENGINE_DEAD, Role.UNIFIED, 503, True),
        ([Role.UNIFIED], ErrorKind.INTERNAL, Role.UNIFIED, 500, True),
        ([Role.UNIFIED], ErrorKind.TIMED_OUT, Role.UNIFIED, 408, False),
        ([Role.PREFILL, Role.DECODE], ErrorKind.TIMED_OUT, Role.DECODE, 408, True),
        ([Role.UNIFIED], ErrorKind.INVALID, Role.UNIFIED, 400, None),
    ],
    ids=str,
)
async def test_errors_about_load_say_whether_gpu_time_was_spent(
    start: Callable[..., Service],
    roles: list[Role],
    kind: ErrorKind | None,
    at: Role | None,
    status: int,
    spent: bool | None,
) -> None:
    service = start(*roles, capacity_timeout_s=0.05, max_attempts=2, local_prefill_max_tokens=0)
    if kind is not None and at is not None:
        refuse_with(service, kind, at)
    response = await service.complete(BODY["prompt"], max_tokens=4)
    assert response.status_code == status, response.text
    assert response.json()["error"].get("gpu_time_spent") is spent
    assert (status == 503) is ("retry-after" in response.headers)


@pytest.mark.parametrize("was_scheduled", [False, True])
@pytest.mark.parametrize("kind", ErrorKind)
def test_refused_attempts_and_those_that_timed_out_in_the_queue_cost_no_gpu_time(
    kind: ErrorKind, was_scheduled: bool
) -> None:
    no_stream: Any = None
    refusals = {ErrorKind.OVERLOADED, ErrorKind.INVALID, ErrorKind.TOO_LONG}
    in_queue = kind is ErrorKind.TIMED_OUT and not was_scheduled
    for has_output in (False, True):
        attempt = Attempt(Placement(view(0).record, 5), no_stream, 0.0, has_output=has_output)
        attempt.note_error(EngineError(kind, "x"), was_scheduled=was_scheduled)
        assert attempt.has_run is (has_output or not (in_queue or kind in refusals))


async def test_the_last_event_of_a_failed_stream_says_that_gpu_time_was_spent(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, capacity_timeout_s=0.05)
    service.cluster.members[0].die_after_tokens = 2
    response = await service.complete(BODY["prompt"], max_tokens=9, ignore_eos=True, stream=True)
    *_, last = events(response.text)
    assert last["error"]["gpu_time_spent"] is True


async def test_every_attempt_carries_the_time_that_is_left(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE, request_timeout_s=9.0)
    prefill, decode = service.cluster.members
    prefill.step_s = 0.05
    assert (await service.complete(list(range(5, 150)), max_tokens=3, ignore_eos=True)).status_code == 200
    (first,), (second,) = prefill.submitted, decode.submitted
    assert 0 < second.timeout_s < first.timeout_s <= 9.0


async def test_an_engine_drops_a_request_whose_time_is_over(start: Callable[..., Service]) -> None:
    """The engine must use its own clock here, since the gateway's abort is lost."""
    timeout_s = 0.2
    service = start(Role.UNIFIED, request_timeout_s=timeout_s)
    (engine,) = service.cluster.members
    engine.running.clear()
    response = asyncio.create_task(service.complete(BODY["prompt"], max_tokens=4))
    await until(lambda: engine.submitted)
    engine.core.abort = lambda request_id: None  # type: ignore[method-assign]
    assert (await response).status_code == 408
    assert engine.stats.num_requests_waiting == 1
    await asyncio.sleep(timeout_s)  # the engine's time began a little later than the gateway's
    engine.running.set()
    await until(lambda: engine.stats.num_requests_waiting == 0)
    await service.cluster.settled()
    assert engine.stats.prompt_tokens == 0, "the engine must compute nothing of an expired request"

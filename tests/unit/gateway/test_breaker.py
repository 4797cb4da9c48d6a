"""Circuit breakers: engines, and pairs of engines, that fail too often get no requests for a while."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from baton.cluster.cli.http_client import print_ranks
from baton.cluster.contracts import Role
from baton.cluster.gateway.routing.breaker import (
    IDLE_PERIODS,
    TRANSITIONS,
    Breakers,
    BreakerSettings,
    Circuit,
    CircuitEvent,
    CircuitKey,
    CircuitState,
)
from baton.cluster.gateway.serving import context
from baton.engine.core.messages import EngineError, EngineRequest, ErrorKind

from ...helpers.fake_cluster import FakeEngine
from ...helpers.gateway_service import Clock, Service
from .engine_views import view

LIMITS = BreakerSettings(failures=3, window_s=10.0, open_s=5.0)
OPENED = 'baton_circuits_opened_total{kind="%s"}'
PEER: CircuitKey = (("e", 1),)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def in_state(state: CircuitState, clock: Clock) -> Circuit:
    circuit = Circuit(LIMITS, clock)
    if state is not CircuitState.CLOSED:
        for _ in range(LIMITS.failures):
            circuit.failed()
    if state is CircuitState.HALF_OPEN:
        clock.now_s += LIMITS.open_s
    assert circuit.state is state
    return circuit


EVENTS: dict[CircuitEvent, Callable[[Circuit, Clock], None]] = {
    CircuitEvent.FAILURES: lambda circuit, clock: [circuit.failed() for _ in range(LIMITS.failures)] and None,
    CircuitEvent.TIME: lambda circuit, clock: setattr(clock, "now_s", clock.now_s + LIMITS.open_s),
    CircuitEvent.TRIAL_SUCCEEDED: lambda circuit, clock: circuit.succeeded(),
    CircuitEvent.TRIAL_FAILED: lambda circuit, clock: circuit.failed() and None,
}


@pytest.mark.parametrize(("state", "event"), TRANSITIONS, ids=str)
def test_each_transition_of_the_table_happens(state: CircuitState, event: CircuitEvent, clock: Clock) -> None:
    circuit = in_state(state, clock)
    EVENTS[event](circuit, clock)
    assert circuit.state is TRANSITIONS[state, event]


def test_a_circuit_stays_closed_below_the_number_of_failures_and_while_most_attempts_succeed(clock: Clock) -> None:
    circuit = Circuit(LIMITS, clock)
    for _ in range(10):
        circuit.succeeded()
    assert [circuit.failed() for _ in range(9)] == [False] * 9
    assert circuit.failed(), "the circuit must open once failures are half of the attempts"


def test_failures_of_long_ago_do_not_count(clock: Clock) -> None:
    circuit = Circuit(LIMITS, clock)
    for _ in range(20):
        circuit.failed()
        clock.now_s += LIMITS.window_s / 2
    assert circuit.state is CircuitState.CLOSED


def test_an_open_circuit_waits_and_then_lets_exactly_one_through(clock: Clock) -> None:
    circuit = in_state(CircuitState.OPEN, clock)
    assert not circuit.lets_through
    clock.now_s += LIMITS.open_s - 0.1
    assert not circuit.lets_through
    clock.now_s += 0.1
    assert circuit.lets_through
    circuit.sent("trial")
    assert not circuit.lets_through


def test_after_a_trial_without_a_result_the_next_trial_is_allowed(clock: Clock) -> None:
    circuit = in_state(CircuitState.HALF_OPEN, clock)
    circuit.sent("trial")
    circuit.sent("had no other engine")
    circuit.left("had no other engine")
    circuit.left("was sent before it opened")
    assert not circuit.lets_through, "the first trial is still running"
    circuit.left("trial")
    assert circuit.lets_through
    assert circuit.state is CircuitState.HALF_OPEN


def test_a_failed_trial_opens_the_circuit_for_the_same_time_again(clock: Clock) -> None:
    circuit = in_state(CircuitState.HALF_OPEN, clock)
    circuit.sent("trial")
    assert circuit.failed()
    circuit.left("trial")
    clock.now_s += LIMITS.open_s / 2
    assert not circuit.lets_through
    clock.now_s += LIMITS.open_s / 2
    assert circuit.lets_through


def test_after_a_trial_that_succeeds_earlier_failures_do_not_count(clock: Clock) -> None:
    circuit = in_state(CircuitState.HALF_OPEN, clock)
    circuit.sent("trial")
    circuit.succeeded()
    assert [circuit.failed() for _ in range(LIMITS.failures)] == [False] * (LIMITS.failures - 1) + [True]


@pytest.mark.parametrize("event", ["an attempt", "a failure"])
def test_a_circuit_is_kept_while_it_has_events(event: str, clock: Clock) -> None:
    breakers, idle_s = Breakers(LIMITS, clock), IDLE_PERIODS * (LIMITS.window_s + LIMITS.open_s)
    breakers.failed(PEER)
    clock.now_s += 0.9 * idle_s
    if event == "an attempt":
        breakers.sent([PEER], "attempt")
    else:
        breakers.failed(PEER)
    clock.now_s += 0.9 * idle_s
    breakers.failed((("other", 2),))
    assert breakers.num_circuits == 2
    clock.now_s += 0.9 * idle_s
    breakers.failed((("other", 2),))
    assert breakers.num_circuits == 1, "the first circuit has had no events for long enough"


def test_circuits_of_processes_that_are_gone_are_forgotten(clock: Clock) -> None:
    breakers = Breakers(LIMITS, clock)
    for number in range(1000):
        breakers.failed(((f"e{number}", number),))
        clock.now_s += LIMITS.window_s
    assert breakers.num_circuits <= IDLE_PERIODS * 2


def test_no_state_is_kept_for_engines_that_never_failed(clock: Clock) -> None:
    breakers = Breakers(LIMITS, clock)
    breakers.sent([PEER], "attempt")
    breakers.succeeded([PEER])
    breakers.left([PEER], "attempt")
    assert breakers.num_circuits == 0


def test_readers_of_another_fingerprint_do_not_keep_a_prefill_engine_in_use(clock: Clock) -> None:
    source, reader, other = view(0, Role.PREFILL), view(1, Role.DECODE), view(2, Role.DECODE, fingerprint="other")
    breakers = Breakers(LIMITS, clock)
    for _ in range(LIMITS.failures):
        breakers.failed((source.record.key, reader.record.key))
    assert breakers.closed_to([source, reader, other]) == {source.record.key}


def fails(engine: FakeEngine, kind: ErrorKind) -> None:
    engine.refuse = EngineError(kind, f"{kind}!")


async def circuits(service: Service) -> dict[str, str]:
    table = (await service.http.get("/v1/cluster/ranks")).json()["data"]
    return {rank["engine_id"]: rank["circuit"] for rank in table}


NUMBERS = itertools.count()


async def ask(service: Service, count: int) -> None:
    """Send requests whose prompts no engine has cached."""
    for number in itertools.islice(NUMBERS, count):
        response = await service.complete([number % 200 + 5, number // 200 + 5] * 10, max_tokens=2, ignore_eos=True)
        assert response.status_code == 200, response.text


async def ask_until(service: Service, has_happened: Callable[[], bool]) -> None:
    """Send requests until the router has chosen the engine: it compares the engines' speeds only once a second."""
    end_s = time.monotonic() + 20
    while not has_happened():
        assert time.monotonic() < end_s, "the engine was not chosen"
        await ask(service, 1)


async def until_opened(service: Service, kind: str) -> None:
    for _ in range(60):
        await ask(service, 1)
        if OPENED % kind in await service.metrics():
            return
    raise AssertionError("no circuit has opened")


@pytest.mark.parametrize("kind", [ErrorKind.INTERNAL, ErrorKind.ENGINE_DEAD])
async def test_an_engine_that_always_fails_gets_no_requests_until_a_trial_succeeds(
    start: Callable[..., Service], kind: ErrorKind, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "Breakers", lambda limits, _, on_open: Breakers(limits, clock, on_open))
    service = start(Role.UNIFIED, Role.UNIFIED, breaker={"failures": 3, "window_s": 60, "open_s": 0.3})
    sick, _ = service.cluster.members
    fails(sick, kind)
    await until_opened(service, "engine")
    assert len(sick.submitted) == 3
    assert (await circuits(service))[sick.record.engine_id] == "open"
    clock.now_s += 0.35
    await ask_until(service, lambda: len(sick.submitted) > 3)  # one trial, which fails
    await ask(service, 20)
    assert len(sick.submitted) == 4
    assert (await service.metrics())[OPENED % "engine"] == 2
    sick.refuse = None
    clock.now_s += 0.35
    await ask_until(service, lambda: len(sick.submitted) > 5)  # the engine gets its share of requests again
    assert (await circuits(service))[sick.record.engine_id] == "closed"


async def test_open_circuits_are_ignored_where_no_other_engine_is_left(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, breaker={"failures": 1, "open_s": 60})
    (only,) = service.cluster.members
    fails(only, ErrorKind.INTERNAL)
    assert (await service.complete("hello")).status_code == 500
    assert (await circuits(service))[only.record.engine_id] == "open"
    only.refuse = None
    await ask(service, 3)


async def test_a_failing_pair_is_avoided_and_its_engines_serve_with_others(
    start: Callable[..., Service],
) -> None:
    P, D = Role.PREFILL, Role.DECODE
    service = start(P, P, D, D, retry_budget_min=1000, breaker={"failures": 2, "window_s": 60, "open_s": 60})
    bad_p, bad_d = service.cluster.members[0], service.cluster.members[2]
    read: list[tuple[FakeEngine, FakeEngine]] = []

    def cut(engine: FakeEngine, request: EngineRequest) -> EngineError | None:
        if request.kv_source is None:
            return None
        holder = service.cluster.wire.offers[request.kv_source.ticket].holder
        source = next(member for member in service.cluster.members if member.connector is holder)
        read.append((source, engine))
        return EngineError(ErrorKind.KV_LOST, "no link") if (source, engine) == (bad_p, bad_d) else None

    service.cluster.fault = cut
    await until_opened(service, "pair")
    assert read.count((bad_p, bad_d)) == 2
    read.clear()
    await ask(service, 60)
    assert set(read) == set(itertools.product(service.cluster.members[:2], service.cluster.members[2:])) - {
        (bad_p, bad_d)
    }
    assert set((await circuits(service)).values()) == {"closed"}
    assert OPENED % "engine" not in await service.metrics()


async def test_expired_offers_open_no_circuit(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE, retry_budget_min=1000, breaker={"failures": 2, "window_s": 60})
    expired: list[str] = []

    def cut(engine: FakeEngine, request: EngineRequest) -> EngineError | None:
        if request.kv_source is None or request.request_id in expired:
            return None
        expired.append(request.request_id)
        return EngineError(ErrorKind.KV_EXPIRED, "the offer has ended")

    service.cluster.fault = cut
    await ask(service, 10)
    assert len(expired) == 10
    assert "baton_circuits_opened_total{" not in await service.metrics()


async def test_a_prefill_engine_from_which_no_engine_can_read_gets_no_prompts(start: Callable[..., Service]) -> None:
    P, D = Role.PREFILL, Role.DECODE
    service = start(P, P, D, retry_budget_min=1000, breaker={"failures": 2, "window_s": 60, "open_s": 60})
    lonely = service.cluster.members[0]

    def cut(engine: FakeEngine, request: EngineRequest) -> EngineError | None:
        source = request.kv_source and service.cluster.wire.offers[request.kv_source.ticket].holder
        return EngineError(ErrorKind.KV_LOST, "no link") if source is lonely.connector else None

    service.cluster.fault = cut
    await until_opened(service, "pair")
    asked = len(lonely.submitted)
    await ask(service, 10)
    assert len(lonely.submitted) == asked


async def test_an_engine_that_never_answers_gets_no_more_requests(start: Callable[..., Service]) -> None:
    settings: dict[str, Any] = {"request_timeout_s": 0.15, "breaker": {"failures": 2, "open_s": 60}}
    service = start(Role.UNIFIED, Role.UNIFIED, **settings)
    silent = service.cluster.members[0]
    silent.running.clear()
    statuses: list[int] = []
    for number in range(5, 250):
        statuses.append((await service.complete([number] * 20, max_tokens=2)).status_code)
        if statuses.count(408) == 2 and statuses[-20:].count(200) == 20:
            break
    assert statuses.count(408) == 2
    assert (await circuits(service))[silent.record.engine_id] == "open"
    console = Console(file=io.StringIO(), width=80)
    print_ranks(console, (await service.http.get("/v1/cluster/ranks")).json())
    shown = console.file.getvalue()
    assert shown.count("circuit open") == 1, "`baton status` must show one open circuit"

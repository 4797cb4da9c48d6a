"""The outcome of an attempt counts for the right circuits, and for the load of its engine."""

from __future__ import annotations

import time
from typing import Any

import pytest

from baton.cluster.contracts import EngineRecord, Role
from baton.cluster.gateway.routing.breaker import Breakers, BreakerSettings, CircuitKey
from baton.cluster.gateway.routing.cost import Load
from baton.cluster.gateway.routing.load import LoadTracker, Placement
from baton.cluster.gateway.routing.prefix_index import PrefixIndex
from baton.cluster.gateway.serving.attempt import Attempt, AttemptTracker, Deadline
from baton.cluster.gateway.serving.retry_policy import Failure
from baton.engine.core.messages import EngineRequest
from baton.engine.core.sampling import SamplingParams

from ...helpers.gateway_service import Clock
from .engine_views import view

READER, HOLDER = view(1, Role.DECODE).record, view(0, Role.PREFILL).record
ENGINE: CircuitKey = (READER.key,)
PAIR: CircuitKey = (HOLDER.key, READER.key)
OPEN_S = 5.0
NEVER = Deadline()


class Stream:
    async def aclose(self) -> None: ...


class Client:
    """Engines that were last heard `silent_s` seconds ago."""

    silent_s = {READER.key: 50.0, HOLDER.key: 3.0}

    def submit(self, engine: EngineRecord, request: EngineRequest) -> Stream:
        return Stream()

    def last_message_s(self, engine: EngineRecord) -> float:
        return time.monotonic() - self.silent_s[engine.key]


class Gateway:
    def __init__(self) -> None:
        self.clock = Clock()
        self.opened: list[CircuitKey] = []
        self.decisions: list[tuple[Failure, float]] = []
        self.loads = LoadTracker(PrefixIndex(self.clock))
        self.breakers = Breakers(BreakerSettings(failures=1, open_s=OPEN_S), self.clock, self.opened.append)
        client: Any = Client()
        self.tracker = AttemptTracker(client, self.loads, self.breakers, lambda *each: self.decisions.append(each))

    def open(self, holder: EngineRecord | None = None) -> Attempt:
        request = EngineRequest(request_id="r", prompt_token_ids=[1] * 40, sampling=SamplingParams())
        return self.tracker.open(Placement(READER, 40, (1, 2)), request, holder)


@pytest.mark.parametrize(
    ("failure", "holder", "opened", "silent_s"),
    [
        (Failure.ENGINE_GONE, None, ENGINE, 50),
        (Failure.ENGINE_FAILED, HOLDER, ENGINE, 50),
        (Failure.KV_LOST, HOLDER, PAIR, 3),
        (Failure.KV_LOST, None, ENGINE, 50),
        (Failure.TIMED_OUT, HOLDER, PAIR, None),
        (Failure.TIMED_OUT, None, ENGINE, None),
        (Failure.KV_EXPIRED, HOLDER, None, None),
        (Failure.ENGINE_LEAVING, None, None, None),
        (Failure.OVERLOADED, None, None, None),
    ],
    ids=str,
)
def test_a_failure_opens_the_circuit_of_the_engine_or_of_the_pair(
    failure: Failure, holder: EngineRecord | None, opened: CircuitKey | None, silent_s: float | None
) -> None:
    gateway = Gateway()
    attempt = gateway.open(holder)
    attempt.sent_s -= 100
    gateway.tracker.note_failure(attempt, failure, NEVER)
    assert gateway.opened == ([] if opened is None else [opened])
    assert [kind for kind, _ in gateway.decisions] == ([] if silent_s is None else [failure])
    assert [seconds for _, seconds in gateway.decisions] == pytest.approx([silent_s] if silent_s else [], abs=1)


def test_an_engine_that_was_silent_before_the_attempt_is_judged_by_the_attempt() -> None:
    gateway = Gateway()
    gateway.tracker.note_failure(gateway.open(), Failure.ENGINE_GONE, NEVER)
    ((_, seconds),) = gateway.decisions
    assert seconds < 1


@pytest.mark.parametrize(("has_output", "by_client"), [(True, False), (False, True)])
def test_a_timeout_that_is_no_fault_of_the_engine_opens_no_circuit(has_output: bool, by_client: bool) -> None:
    gateway = Gateway()
    attempt = gateway.open()
    attempt.has_output = has_output
    gateway.tracker.note_failure(attempt, Failure.TIMED_OUT, Deadline(0.0, by_client))
    assert gateway.opened == []


def test_a_first_output_closes_the_circuits_of_engine_and_pair() -> None:
    gateway = Gateway()
    gateway.breakers.failed(ENGINE)
    gateway.breakers.failed(PAIR)
    gateway.clock.now_s += OPEN_S
    gateway.tracker.note_first_output(gateway.open(HOLDER))
    gateway.open(HOLDER)
    gateway.open(HOLDER)
    assert gateway.breakers.closed_from(HOLDER) == set()
    assert gateway.breakers.closed_to([]) == set()


@pytest.mark.parametrize("has_output", [False, True])
async def test_a_closed_attempt_leaves_no_load_and_no_trial(has_output: bool) -> None:
    gateway = Gateway()
    gateway.breakers.failed(ENGINE)
    gateway.clock.now_s += OPEN_S
    attempt = gateway.open()
    assert (gateway.loads.own, gateway.breakers.num_trials) == (Load(1, 40), 1)
    if has_output:
        gateway.tracker.note_first_output(attempt)
    await gateway.tracker.close(attempt)
    assert (gateway.loads.own, gateway.breakers.num_trials) == (Load(0, 0), 0)

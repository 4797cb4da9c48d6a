"""Engines that failed a request, and those with open circuits, are chosen for its next attempt only without another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from baton.cluster.contracts import EngineView, Role
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.routing.breaker import BreakerSettings
from baton.cluster.gateway.serving.context import ServingContext
from baton.cluster.gateway.serving.engine_selector import EngineSelector
from baton.cluster.gateway.serving.retry_policy import AttemptHistory, Failure, Rung
from baton.cluster.gateway.settings import GatewaySettings

from .engine_views import view
from .router_requests import wanted

QUERY = wanted([1] * 20)


class Gateway:
    """The engines that a gateway reaches, and the history of one request."""

    def __init__(self, *engines: EngineView, pinned_rank: int | None = None) -> None:
        self._engines = engines
        client: Any = self
        self.serving = ServingContext(
            client, GatewaySettings(breaker=BreakerSettings(failures=1, open_s=60.0)), GatewayMetrics("m", self.engines)
        )
        self.history = AttemptHistory(max_attempts=3)
        self.selector = EngineSelector(self.serving, self.history, pinned_rank)

    def engines(self) -> Sequence[EngineView]:
        return self._engines

    def select(self, failure: Failure | None = None) -> tuple[Rung, int] | None:
        found = self.selector.select(failure, QUERY, None)
        return None if found is None else (found.rung, found.placement.engine.rank)

    def reader(self, holder: EngineView) -> int | None:
        found = self.selector.reader(QUERY, holder.record)
        return None if found is None else found.engine.rank


def test_an_engine_that_refused_a_request_for_lack_of_room_does_not_get_it_again() -> None:
    first, second = view(0), view(1)
    gateway = Gateway(first, second)
    gateway.history.refused.add(first.record.key)
    gateway.history.avoided.add(second.record.key)
    assert gateway.select(Failure.ENGINE_GONE) == (Rung.AGAIN, 1)
    gateway.history.refused.add(second.record.key)
    assert [gateway.select(failure) for failure in (None, Failure.ENGINE_GONE, Failure.OVERLOADED)] == [None] * 3


def test_an_engine_that_leaves_does_not_get_a_request_again() -> None:
    leaving = view(0)
    gateway = Gateway(leaving)
    gateway.history.departed.add(leaving.record.key)
    assert [gateway.select(failure) for failure in (None, Failure.ENGINE_LEAVING)] == [None] * 2


def test_an_open_circuit_counts_only_if_there_is_another_engine() -> None:
    failing, busy = view(0), view(1, num_requests_running=99)
    for engines, rank in ([failing, busy], 1), ([failing], 0):
        gateway = Gateway(*engines)
        gateway.serving.breakers.failed((failing.record.key,))
        assert gateway.select() == (Rung.ANY, rank)


@pytest.mark.parametrize("why", ["circuit", "circuit of the pair", "avoided", "refused"])
def test_a_reader_that_failed_is_chosen_only_without_another_and_never_if_it_refused(why: str) -> None:
    holder, failing, busy = view(0, Role.PREFILL), view(1, Role.DECODE), view(2, Role.DECODE, num_requests_running=99)
    for engines, rank in ([holder, failing, busy], 2), ([holder, failing], None if why == "refused" else 1):
        gateway = Gateway(*engines)
        match why:
            case "circuit":
                gateway.serving.breakers.failed((failing.record.key,))
            case "circuit of the pair":
                gateway.serving.breakers.failed((holder.record.key, failing.record.key))
            case "avoided":
                gateway.history.avoided.add(failing.record.key)
            case "refused":
                gateway.history.refused.add(failing.record.key)
        assert gateway.reader(holder) == rank


def test_a_pinned_request_stays_with_its_rank() -> None:
    engines = [view(0), view(1), view(2)]
    assert Gateway(*engines, pinned_rank=2).select() == (Rung.ANY, 2)
    gateway = Gateway(*engines, pinned_rank=2)
    gateway.history.avoided.add(engines[2].record.key)
    assert gateway.select(Failure.ENGINE_FAILED) == (Rung.AGAIN, 2)

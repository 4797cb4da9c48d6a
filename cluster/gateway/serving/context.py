"""The objects that all sequences of one gateway share."""

from __future__ import annotations

import time
from typing import Protocol

from prometheus_client import Counter, Gauge

from baton.cluster.contracts import EngineClient

from ..routing.breaker import Breakers, CircuitKey
from ..routing.rates import LearntRates
from ..routing.router import Router
from ..settings import GatewaySettings
from .admission import AdmissionControl
from .attempt import AttemptTracker
from .retry_policy import RetryBudget


class SequenceMetrics(Protocol):
    """The metrics that sequences update."""

    requests: Counter  # sequences
    unplaced: Gauge  # sequences that wait for an engine
    paths: Counter  # chosen engines, by path and reason
    retries: Counter  # further attempts, by reason
    rungs: Counter  # engines chosen after a failure, by rung and reason

    def observe_decision(self, failure: str, seconds: float) -> None: ...
    def circuit_opened(self, circuit: CircuitKey) -> None: ...


class ServingContext:
    """The engines, and all that the gateway knows of them. Nothing here belongs to a single sequence."""

    def __init__(
        self,
        client: EngineClient,
        settings: GatewaySettings,
        metrics: SequenceMetrics,
        *,
        scales_from_zero: bool = False,
    ) -> None:
        """`scales_from_zero`: an autoscaler starts engines once requests wait for them."""
        self.client = client
        self.settings = settings
        self.metrics = metrics
        rates = LearntRates(settings.cost, time.monotonic)
        self.router = Router(
            settings.gateway_id,
            rates=rates,
            session_patience_s=settings.session_patience_s,
            local_prefill_max_tokens=settings.local_prefill_max_tokens,
        )
        self.admission = AdmissionControl(settings, rates, time.monotonic)
        self.breakers = Breakers(settings.breaker, time.monotonic, metrics.circuit_opened)
        self.attempts = AttemptTracker(client, self.router.loads, self.breakers, metrics.observe_decision)
        self.retry_budget = RetryBudget(settings.retry_budget, settings.retry_budget_min, time.monotonic)
        self._scales_from_zero = scales_from_zero

    def reconfigure(self, settings: GatewaySettings) -> None:
        """Apply other settings. Running sequences use them from their next wait or attempt on."""
        self.settings = settings
        self.router.reconfigure(settings.cost, settings.session_patience_s, settings.local_prefill_max_tokens)
        self.admission.reconfigure(settings)
        self.breakers.reconfigure(settings.breaker)
        self.retry_budget.reconfigure(settings.retry_budget, settings.retry_budget_min)

    def retry_after_s(self) -> float:
        """Return how long a refused client should wait: until the shortest queue is worked off."""
        return self.admission.retry_after_s(self.client.engines())

    def is_ready(self) -> bool:
        """Return True if a request can be served now, or if engines would start for it."""
        return self._scales_from_zero or any(view.record.role.writes_answers for view in self.client.engines())

"""Which way a sequence goes: down the ladder, to the first rung on which an engine can serve it."""

from __future__ import annotations

import logging

import msgspec

from baton.engine.core.messages import EngineRequest

from ..metrics import GatewayMetrics
from ..routing.router import NO_PREFILL_ENGINE, Path
from .attempt import Attempt, AttemptTracker
from .engine_selector import EngineSelector
from .handoff import HandOff
from .progress import Progress
from .retry_policy import RETRY_POLICY, Failure, Rung

logger = logging.getLogger(__name__)


class RetryPath:
    """Of one sequence, to its newest attempt."""

    def __init__(
        self,
        progress: Progress,
        selector: EngineSelector,
        tracker: AttemptTracker,
        handoff: HandOff,
        metrics: GatewayMetrics,
    ) -> None:
        self._path = Path.UNIFIED
        self._rung = Rung.ANY
        self._reason = ""
        self._progress = progress
        self._selector = selector
        self._tracker = tracker
        self._handoff = handoff
        self._metrics = metrics

    def __str__(self) -> str:
        """For people: `x-baton-path`."""
        rung = "" if self._rung is Rung.ANY else f"; rung={self._rung}"
        return f"{self._path}; reason={self._reason}{rung}"

    def next_attempt(self, failure: Failure | None) -> Attempt | None:
        """In the best engine there is now, if any. `failure`: of what went before; None at the beginning."""
        request = self._progress.request()
        for rung in (Rung.ANY,) if failure is None else RETRY_POLICY[failure].rungs:
            if rung is Rung.OTHER_DECODE:
                attempt = self._go_on_from_offer(request, failure)
            else:
                attempt = self._compute(rung, request, failure)
            if attempt is not None:
                return attempt
        return None

    def _go_on_from_offer(self, request: EngineRequest, failure: Failure | None) -> Attempt | None:
        reader = self._handoff.reader(request)
        if reader is None:
            return None
        if failure is not Failure.NO_READER:  # which is how every hand-off begins
            self._note(self._path, Rung.OTHER_DECODE, failure)
        return self._tracker.open(*reader)

    def _compute(self, rung: Rung, request: EngineRequest, failure: Failure | None) -> Attempt | None:
        """Lets an engine compute all tokens so far."""
        route = self._selector.route(rung, self._progress.wanted(request))
        if route is None:
            return None
        if self._handoff.has_offer:
            self._handoff.withdraw()
            self._progress.generation += 1
            request = msgspec.structs.replace(request, generation=self._progress.generation)
        if failure is None:
            self._note(route.path, rung, None, route.reason)
        else:
            self._note(Path.RECOMPUTED, Rung.RECOMPUTE if route.path is Path.LOCAL_PREFILL else rung, failure)
        return self._tracker.open(route.placement, msgspec.structs.replace(request, keep_kv=route.hands_off))

    def _note(self, path: Path, rung: Rung, failure: Failure | None, reason: str = "") -> None:
        self._path, self._rung = path, rung
        self._reason = reason or failure or ""
        self._metrics.paths.labels(self._path, self._reason).inc()
        if failure is not None or reason == NO_PREFILL_ENGINE:
            logger.info("%s goes another way: %s", self._progress.request_id, self)
        if failure is not None:
            self._metrics.rungs.labels(self._rung, self._reason).inc()

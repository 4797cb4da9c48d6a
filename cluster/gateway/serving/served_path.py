"""The path by which a sequence is served: the value of `x-baton-path`, its metrics and its log line."""

from __future__ import annotations

import logging

from ..routing.router import NO_PREFILL_ENGINE, Path
from .context import SequenceMetrics
from .engine_selector import Selection
from .retry_policy import Failure, Rung

logger = logging.getLogger(__name__)


class ServedPath:
    """`PATH; reason=REASON`, after a failed attempt `PATH; reason=REASON; rung=RUNG`."""

    def __init__(self, request_id: str, metrics: SequenceMetrics) -> None:
        self._request_id = request_id
        self._metrics = metrics
        self._path = Path.UNIFIED
        self._rung = Rung.ANY
        self._reason = ""

    def __str__(self) -> str:
        rung = "" if self._rung is Rung.ANY else f"; rung={self._rung}"
        return f"{self._path}; reason={self._reason}{rung}"

    def note(self, found: Selection, failure: Failure | None) -> None:
        """Note the engine that was found, after `failure` if it is not the first one."""
        route = found.route
        if route is None:
            if failure is Failure.NO_READER:
                return  # every hand-off begins so
            self._rung = found.rung
        elif failure is None:
            self._path, self._rung = route.path, found.rung
        else:
            self._path = Path.RECOMPUTED
            self._rung = Rung.RECOMPUTE if route.path is Path.LOCAL_PREFILL else found.rung
        self._reason = route.reason if route is not None and failure is None else str(failure)
        self._metrics.paths.labels(self._path, self._reason).inc()
        if failure is not None:
            self._metrics.rungs.labels(self._rung, self._reason).inc()
        if failure is not None or self._reason == NO_PREFILL_ENGINE:
            logger.info("%s goes another way: %s", self._request_id, self)

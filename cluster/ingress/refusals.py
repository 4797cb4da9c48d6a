"""Requests that the HTTP server refuses before the application sees them: counted, and told in the log."""

from __future__ import annotations

import logging
import time

from baton.cluster.gateway.errors import ApiError
from baton.cluster.gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

ROUTE = "other"  # as the application counts what is none of its routes
TELL_AGAIN_S = 10.0  # a flood of connections is told in a line now and then


class Refusals:
    """Counts and logs the refusals of one gateway's HTTP server."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._untold = 0  # connections that were refused since the last line about them
        self._tell_s = 0.0

    def __call__(self, error: ApiError, client: str) -> None:
        self._metrics.responses.labels(ROUTE, error.status).inc()
        if error.status != 503:
            logger.info("a request of %s was refused with %d: %s", client, error.status, error.message)
            return
        self._untold += 1
        if time.monotonic() >= self._tell_s:
            logger.warning(
                "connections refused with 503, the last one of %s: %d. As many are open as this process may have files "
                "(ulimit -n)",
                client,
                self._untold,
            )
            self._untold, self._tell_s = 0, time.monotonic() + TELL_AGAIN_S

"""The parts of a gateway that all of its requests use, and the list of those that generate now."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import ended_by_operator
from ..metrics import GatewayMetrics
from ..model import ServedModel
from ..serving.context import ServingContext
from ..serving.recent_requests import RecentRequests
from ..settings import GatewaySettings
from ..tracing import RequestSpans
from .body_service import BodyService
from .deadlines import RequestDeadlines
from .response_writer import WritingTurns


class GeneratingRequests:
    """This gateway's running generating requests by their ids. Clients choose the ids, so several may share one."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[RequestDeadlines]] = {}

    @contextmanager
    def listed(self, request_id: str, deadlines: RequestDeadlines) -> Iterator[None]:
        """List a request while the block runs."""
        self._by_id.setdefault(request_id, []).append(deadlines)
        try:
            yield
        finally:
            same = self._by_id[request_id]
            same.remove(deadlines)
            if not same:
                del self._by_id[request_id]

    def end(self, request_id: str) -> int:
        """End the requests with this id, and return their number."""
        found = self._by_id.get(request_id, [])
        for deadlines in found:
            deadlines.end(ended_by_operator())
        return len(found)


@dataclass(frozen=True)
class GatewayServices:
    """The parts of a gateway that every request uses."""

    model: ServedModel
    metrics: GatewayMetrics
    serving: ServingContext
    bodies: BodyService
    spans: RequestSpans | None  # None: no exporter is configured
    turns: WritingTurns = dataclasses.field(default_factory=WritingTurns)
    running: GeneratingRequests = dataclasses.field(default_factory=GeneratingRequests)
    recent: RecentRequests = dataclasses.field(default_factory=RecentRequests)

    @property
    def settings(self) -> GatewaySettings:
        """Return the settings in force, which may change."""
        return self.serving.settings

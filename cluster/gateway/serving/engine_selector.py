"""Chooses the engine for a sequence's next attempt, avoiding engines that failed it and those with open circuits.

`ServedPath` records which engines served the sequence, and how: for `x-baton-path`, metrics and the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.contracts import EngineRecord, EngineView, Role

from ..routing.load import Placement
from ..routing.ranks import reachable
from ..routing.router import NO_PREFILL_ENGINE, Path, Route, RoutingQuery
from .context import SequenceMetrics, ServingContext
from .retry_policy import RETRY_POLICY, AttemptHistory, Failure, Rung

ROLES: dict[Rung, frozenset[Role]] = {
    Rung.OTHER_PREFILL: frozenset({Role.PREFILL, Role.DECODE}),
    Rung.RECOMPUTE: frozenset({Role.DECODE}),
    Rung.UNIFIED: frozenset({Role.UNIFIED}),
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """An engine for the next attempt."""

    rung: Rung
    placement: Placement
    route: Route | None  # None: the engine fetches the KV on offer


class EngineSelector:
    """Selects engines for one sequence. It keeps no state: each answer is about the engines as they are now."""

    def __init__(self, serving: ServingContext, history: AttemptHistory, pinned_rank: int | None) -> None:
        self._serving = serving
        self._history = history
        self._pinned_rank = pinned_rank

    def select(self, failure: Failure | None, query: RoutingQuery, holder: EngineRecord | None) -> Selection | None:
        """Return an engine on the first rung that has one.

        `failure` is that of the attempt before, None at the first. `holder` is the engine with KV on offer, if any.
        """
        for rung in (Rung.ANY,) if failure is None else RETRY_POLICY[failure].rungs:
            if rung is Rung.OTHER_DECODE:
                if holder is not None and (placement := self.reader(query, holder)) is not None:
                    return Selection(rung, placement, None)
            elif (route := self._route(rung, query)) is not None:
                return Selection(rung, route.placement, route)
        return None

    def reader(self, query: RoutingQuery, holder: EngineRecord) -> Placement | None:
        """Return a decode engine that can fetch the KV of `holder`."""
        breakers, engines = self._serving.breakers, self._engines()
        refused = self._history.refused
        avoid = refused | self._history.avoided | breakers.closed_to(engines) | breakers.closed_from(holder)
        choose = self._serving.router.decode_placement
        return choose(engines, query, holder, avoid) or choose(engines, query, holder, refused)

    @property
    def are_full(self) -> bool:
        """True if each engine has refused the sequence for lack of room, or has reported a full queue."""
        return self._serving.admission.are_full(self._engines(), self._history.refused)

    def _route(self, rung: Rung, query: RoutingQuery) -> Route | None:
        """Return an engine that computes all tokens up to now."""
        choose, refused = self._serving.router.route, self._history.refused
        engines = _on_rung(rung, self._engines())
        if rung is Rung.AGAIN:
            return choose(engines, query, refused)
        avoid = refused | self._history.avoided | self._serving.breakers.closed_to(engines)
        route = choose(engines, query, avoid)
        if rung is Rung.ANY:
            return route or choose(engines, query, refused)
        if rung is Rung.OTHER_PREFILL and route is not None and route.reason == NO_PREFILL_ENGINE:
            return None  # leave it to the rung `RECOMPUTE`, which takes only engines without a queue
        return route

    def _engines(self) -> Sequence[EngineView]:
        engines = reachable(self._serving.client, self._pinned_rank)
        return [view for view in engines if view.record.key not in self._history.departed]


def _on_rung(rung: Rung, engines: Sequence[EngineView]) -> list[EngineView]:
    """Return the engines that may serve a request on this rung."""
    roles = ROLES.get(rung, frozenset(Role))
    chosen = [view for view in engines if view.record.role in roles]
    return [view for view in chosen if not _has_queue(view)] if rung is Rung.RECOMPUTE else chosen


def _has_queue(view: EngineView) -> bool:
    """Return whether requests wait in an engine: another prompt would delay them, and not only running answers."""
    return view.stats is not None and view.stats.num_requests_waiting > 0


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
        """Record the selected engine; `failure` is that of the attempt before, None at the first."""
        route = found.route
        if route is None:
            if failure is Failure.NO_READER:
                return  # not a failure here: each hand-off begins like this
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
            logger.info("%s takes another path: %s", self._request_id, self)

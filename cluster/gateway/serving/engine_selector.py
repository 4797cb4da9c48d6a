"""Who serves a sequence: on a rung of the ladder, past those that failed it and those that circuits keep away."""

from __future__ import annotations

from collections.abc import Sequence

from baton.cluster.contracts import EngineClient, EngineRecord, EngineView

from ..routing.breaker import Breakers
from ..routing.load import Placement, engine_key
from ..routing.ranks import reachable
from ..routing.router import NO_PREFILL_ENGINE, Route, Router, RoutingQuery
from .admission import AdmissionControl
from .retry_policy import AttemptHistory, Rung, on_rung


class EngineSelector:
    """For one sequence. It changes nothing: each answer is of the engines as they are now."""

    def __init__(
        self,
        client: EngineClient,
        router: Router,
        breakers: Breakers,
        admission: AdmissionControl,
        history: AttemptHistory,
        pinned_rank: int | None,
    ) -> None:
        self._client = client
        self._router = router
        self._breakers = breakers
        self._admission = admission
        self._history = history
        self._pinned_rank = pinned_rank

    def route(self, rung: Rung, wanted: RoutingQuery) -> Route | None:
        """A way to compute all tokens so far."""
        engines, full = on_rung(rung, self._engines()), self._history.full
        if rung is Rung.AGAIN:
            return self._router.route(engines, wanted, full)
        avoid = full | self._history.lost | self._breakers.closed_to(engines)
        route = self._router.route(engines, wanted, avoid)
        if rung is Rung.ANY:
            return route or self._router.route(engines, wanted, full)
        if rung is Rung.OTHER_PREFILL and route is not None and route.reason == NO_PREFILL_ENGINE:
            return None  # that is the next rung, which asks for slack
        return route

    def reader(self, wanted: RoutingQuery, holder: EngineRecord) -> Placement | None:
        """A decode engine for the KV of `holder`."""
        engines, full = self._engines(), self._history.full
        avoid = full | self._history.lost | self._breakers.closed_to(engines) | self._breakers.closed_from(holder)
        choose = self._router.decode_placement
        return choose(engines, wanted, holder, avoid) or choose(engines, wanted, holder, full)

    @property
    def are_full(self) -> bool:
        """Each engine has refused the sequence for lack of room, or has told that it would."""
        return self._admission.are_full(self._engines(), self._history.full)

    def _engines(self) -> Sequence[EngineView]:
        engines = reachable(self._client, self._pinned_rank)
        return [view for view in engines if engine_key(view.record) not in self._history.left]

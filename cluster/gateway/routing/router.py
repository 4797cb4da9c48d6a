"""The router: chooses the engine or pair of engines that serves a request in the fewest seconds (`cost.py`).

Cached prefixes need no work, and those in tiers little. Everything that a gateway knows of engines comes from them: one
that starts knows what the others know as soon as its connections are there. What it has sent, and the engines have not
reported yet, is in `load.py` and `prefix_index.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from baton.cluster.cached_blocks import BlockName, FoundPrefix
from baton.cluster.contracts import EngineRecord, EngineView, Role
from baton.engine.core.block_log import unpack_names
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineRequest

from .cost import Cost, CostRates, PrefillWork
from .load import LoadTracker, Placement
from .prefix_index import EngineKey, PrefixIndex, engine_key, prefix_names

EQUAL = 1.05  # costs closer than this are equal: gateways with the same reports must not all choose one engine
NO_PREFILL_ENGINE = "no-prefill-engine"
WORTHWHILE_HIT = 256  # cached tokens with which a decode engine may be the better one to compute a prompt


class Path(enum.StrEnum):
    """The kinds of ways to serve a request, as `x-baton-path` names them."""

    DISAGGREGATED = "disaggregated"  # a prefill engine computes the prompt, a decode engine goes on
    UNIFIED = "unified"
    LOCAL_PREFILL = "local-prefill"  # a decode engine does both: there is no prefill engine, or it costs more
    RECOMPUTED = "recomputed"  # an attempt was lost, and another engine computes all tokens so far


@dataclass(frozen=True)
class RoutingQuery:
    """A request, as far as the router needs to know it."""

    num_tokens: int
    names: Sequence[BlockName]  # of those full blocks of the prompt that an engine may find in its cache
    tie: str  # orders engines of equal cost
    session: bool = False  # `tie` is the session's: the same engine comes first for all of its requests
    pinned_rank: int | None = None  # an engine that must take part

    def with_tokens(self, num_tokens: int) -> RoutingQuery:
        return dataclasses.replace(self, num_tokens=num_tokens)


@dataclass(frozen=True)
class Route:
    """The engine that a request's next tokens come from."""

    placement: Placement
    hands_off: bool  # the engine only prefills; a decode engine is chosen when the KV is ready
    path: Path
    reason: str


@dataclass(frozen=True)
class _Option:
    is_full: bool  # no room for the request's KV now
    cost_s: float
    placement: Placement
    path: Path = Path.DISAGGREGATED


class Router:
    """Chooses engines for the requests of one gateway."""

    def __init__(
        self,
        gateway_id: str,
        *,
        rates: CostRates,
        session_patience_s: float,
        local_prefill_max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway_id = gateway_id
        self._cost = Cost(rates)
        self._session_patience_s = session_patience_s
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self.prefixes = PrefixIndex(clock)
        self.loads = LoadTracker(self.prefixes)

    def reconfigure(self, rates: CostRates, session_patience_s: float, local_prefill_max_tokens: int) -> None:
        """Take other settings from the next choice on."""
        self._cost = Cost(rates)
        self._session_patience_s = session_patience_s
        self._local_prefill_max_tokens = local_prefill_max_tokens

    def read(
        self,
        request: EngineRequest,
        names: Sequence[BlockName] | None = None,
        *,
        session_id: str | None = None,
        pinned_rank: int | None = None,
    ) -> RoutingQuery:
        """Return the query for a request. `names` are those of the prompt's blocks, where they are known."""
        if names is None:
            packed = prefix_names(request.prompt_token_ids, request.sampling, request.cache_salt)
            names = unpack_names(packed)
        tie = f"{self._gateway_id}/{request.request_id}" if session_id is None else f"session/{session_id}"
        return RoutingQuery(num_tokens(request), names, tie, session_id is not None, pinned_rank)

    def route(
        self, engines: Sequence[EngineView], query: RoutingQuery, avoid: Collection[EngineKey] = ()
    ) -> Route | None:
        """Return an engine for all tokens that the request has so far, or None if no engine can take it now.

        An engine that drains is chosen only if no other can take it.
        """
        return self._route(_staying(engines), query, avoid) or self._route(engines, query, avoid)

    def _route(self, engines: Sequence[EngineView], query: RoutingQuery, avoid: Collection[EngineKey]) -> Route | None:
        best = self._best(self._options(engines, query, avoid), query)
        if best is not None:
            if best.path is Path.LOCAL_PREFILL:
                reason = "cheaper"
            else:
                reason = "prefix-hit" if best.placement.uncached < query.num_tokens else "least-loaded"
            return Route(best.placement, best.path is Path.DISAGGREGATED, best.path, reason)
        best = self._best(self._local_options(engines, query, avoid), query)
        if best is None:
            return None
        return Route(best.placement, False, Path.LOCAL_PREFILL, NO_PREFILL_ENGINE)

    def decode_placement(
        self,
        engines: Sequence[EngineView],
        query: RoutingQuery,
        source: EngineRecord,
        avoid: Collection[EngineKey] = (),
    ) -> Placement | None:
        """Return a decode engine that can fetch the KV of the engine `source`; see `route` for engines that drain."""
        staying = self._receiver(_staying(engines), query, source, avoid)
        return staying or self._receiver(engines, query, source, avoid)

    def _receiver(
        self, engines: Sequence[EngineView], query: RoutingQuery, source: EngineRecord, avoid: Collection[EngineKey]
    ) -> Placement | None:
        options = []
        for view in engines:
            record = view.record
            if not _pairs(source, record) or engine_key(record) in avoid:
                continue
            missing = self._missing(view, query)
            cost_s = self._receive_s(view, missing, same_node=record.node_id == source.node_id)
            options.append(_Option(_is_full(view, query.num_tokens), cost_s, Placement(record, 0)))
        best = self._best(options, query)
        return best.placement if best else None

    def _options(
        self, engines: Sequence[EngineView], query: RoutingQuery, avoid: Collection[EngineKey]
    ) -> list[_Option]:
        decoders = [
            view for view in engines if view.record.role is Role.DECODE and engine_key(view.record) not in avoid
        ]
        receivers = _Receivers(self, decoders, query)
        options = []
        for view in engines:
            record = view.record
            if engine_key(record) in avoid or record.role is Role.DECODE:
                continue
            work, load, path = self._prefill_work(view, query), self.loads.of(view), Path.UNIFIED
            if record.role is Role.UNIFIED:
                cost_s = self._cost.whole_s(load, work)
            elif (receive_s := receivers.cheapest_s(record)) is not None:
                cost_s = self._cost.prefill_only_s(view, load, work) + receive_s
                path = Path.DISAGGREGATED
            else:
                continue
            placement = Placement(record, work.uncached, query.names)
            options.append(_Option(_is_full(view, query.num_tokens), cost_s, placement, path))
        if options:
            options += self._local_options(decoders, query, avoid, min_hit=WORTHWHILE_HIT)
        return options

    def _local_options(
        self, engines: Iterable[EngineView], query: RoutingQuery, avoid: Collection[EngineKey], min_hit: int = 0
    ) -> list[_Option]:
        """Return the decode engines that can compute the prompt themselves."""
        options = []
        for view in engines:
            record = view.record
            if record.role is not Role.DECODE or engine_key(record) in avoid:
                continue
            if query.pinned_rank not in (None, record.rank):
                continue
            work = self._prefill_work(view, query)
            if work.uncached > self._local_prefill_max_tokens or query.num_tokens - work.uncached < min_hit:
                continue
            cost_s = self._cost.whole_s(self.loads.of(view), work)
            placement = Placement(record, work.uncached, query.names)
            options.append(_Option(_is_full(view, query.num_tokens), cost_s, placement, Path.LOCAL_PREFILL))
        return options

    def _best(self, options: Collection[_Option], query: RoutingQuery) -> _Option | None:
        """Return the cheapest option; among equal ones, the first in the request's own order.

        An engine without room for the request's KV is taken only if no other is there.
        """
        options = [option for option in options if not option.is_full] or options
        if not options:
            return None
        cheapest = min(options, key=lambda option: option.cost_s)
        limit_s = cheapest.cost_s + self._session_patience_s if query.session else cheapest.cost_s * EQUAL
        equals = [option for option in options if option.cost_s <= limit_s and option.path is cheapest.path]
        return min(equals, key=lambda option: _order(query.tie, option.placement.engine))

    def _prefill_work(self, view: EngineView, query: RoutingQuery) -> PrefillWork:
        return self._cost.prefill_work(view, query.num_tokens, self._found(view, query))

    def _missing(self, view: EngineView, query: RoutingQuery) -> int:
        """Return how many tokens a hand-off has to bring: it looks into the pool only."""
        return query.num_tokens - self._found(view, query).pool * BLOCK_SIZE

    def _found(self, view: EngineView, query: RoutingQuery) -> FoundPrefix:
        return self.prefixes.find(view.cached, engine_key(view.record), query.names)

    def _receive_s(self, view: EngineView, missing: int, *, same_node: bool) -> float:
        """Return handoff + decode of a decode engine."""
        return self._cost.handoff_s(view, missing, same_node=same_node) + self._cost.decode_s(self.loads.of(view))


class _Receivers:
    """Finds the cheapest decode engine for each prefill engine, without a look at every pair.

    A link is within a node or between nodes, so each decode engine has two costs.
    """

    def __init__(self, router: Router, decoders: Iterable[EngineView], query: RoutingQuery) -> None:
        near: defaultdict[tuple[str, str], list[float]] = defaultdict(list)  # by fingerprint and node
        far: defaultdict[str, list[float]] = defaultdict(list)
        for view in decoders:
            record, missing = view.record, router._missing(view, query)
            near[record.fingerprint, record.node_id].append(router._receive_s(view, missing, same_node=True))
            far[record.fingerprint].append(router._receive_s(view, missing, same_node=False))
        self._near_s = {place: min(costs_s) for place, costs_s in near.items()}
        self._far_s = {fingerprint: min(costs_s) for fingerprint, costs_s in far.items()}

    def cheapest_s(self, source: EngineRecord) -> float | None:
        """Return its seconds, or None if no decode engine can fetch this engine's KV."""
        far_s = self._far_s.get(source.fingerprint)
        if far_s is None:
            return None
        return min(far_s, self._near_s.get((source.fingerprint, source.node_id), far_s))


def _staying(engines: Sequence[EngineView]) -> list[EngineView]:
    return [view for view in engines if not view.record.draining]


def num_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def _pairs(source: EngineRecord, record: EngineRecord) -> bool:
    return record.role is Role.DECODE and record.fingerprint == source.fingerprint


def _is_full(view: EngineView, tokens: int) -> bool:
    return view.stats is not None and view.stats.num_blocks_free * BLOCK_SIZE < tokens


def _order(tie: str, engine: EngineRecord) -> bytes:
    """Rank engines by rendezvous hashing: when one leaves, only requests move whose first it was."""
    return hashlib.blake2b(f"{tie}/{engine.engine_id}/{engine.epoch}".encode(), digest_size=8).digest()

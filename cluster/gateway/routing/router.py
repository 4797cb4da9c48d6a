"""Chooses engines: the cheapest way to serve a request, in seconds (`cost.py`), where cached prefixes need no work, and
those in tiers little.

Everything it knows of the engines comes from them: a gateway that starts knows what the others know as soon as its
connections are there. What it has sent itself and not heard of yet is in its loads.
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
from baton.engine.core.block_log import pack_names, unpack_names
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineRequest
from baton.engine.core.prefix import block_hashes
from baton.engine.core.sampling import SamplingParams

from .cost import Cost, CostRates, PrefillEstimate
from .load import EngineKey, LoadTracker, Placement, engine_key

EQUAL = 1.05  # costs closer than this are equal: gateways whose news are as old must not all choose the same engine
NO_PREFILL_ENGINE = "no-prefill-engine"
WORTHWHILE_HIT = 256  # cached tokens with which a decode engine may be the better one to read a prompt


class Path(enum.StrEnum):
    """How a request is served, as its `x-baton-path` says."""

    DISAGGREGATED = "disaggregated"  # one engine prefills, another decodes
    UNIFIED = "unified"
    LOCAL_PREFILL = "local-prefill"  # a decode engine does both: no prefill engine is there, or it does not pay
    RECOMPUTED = "recomputed"  # a first attempt was lost, an engine computes the tokens so far again


@dataclass(frozen=True)
class RoutingQuery:
    """What the router needs to know of a request."""

    num_tokens: int
    names: Sequence[BlockName]  # of those full blocks of the prompt that an engine may find in its cache
    tie: str  # orders engines of equal cost
    session: bool = False  # the same order for every request of a session: its home comes first
    pinned_rank: int | None = None  # an engine that must take part

    def with_tokens(self, num_tokens: int) -> RoutingQuery:
        return dataclasses.replace(self, num_tokens=num_tokens)


@dataclass(frozen=True)
class Route:
    """Where a request's next tokens come from."""

    placement: Placement
    hands_off: bool  # the engine only prefills; a decode engine is chosen when its KV is ready
    path: Path
    reason: str


@dataclass(frozen=True)
class _Option:
    is_full: bool  # no room for the request's KV now
    cost_s: float
    placement: Placement
    path: Path = Path.DISAGGREGATED


class Router:
    """One gateway's choices."""

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
        self.loads = LoadTracker(clock)

    def read(
        self,
        request: EngineRequest,
        names: Sequence[BlockName] | None = None,
        *,
        session_id: str | None = None,
        pinned_rank: int | None = None,
    ) -> RoutingQuery:
        """Return what routing needs. `names` are those of the prompt's blocks, where they are known."""
        if names is None:
            packed = prefix_names(request.prompt_token_ids, request.sampling, request.cache_salt)
            names = unpack_names(packed)
        tie = f"{self._gateway_id}/{request.request_id}" if session_id is None else f"session/{session_id}"
        return RoutingQuery(num_tokens(request), names, tie, session_id is not None, pinned_rank)

    def route(
        self, engines: Sequence[EngineView], wanted: RoutingQuery, avoid: Collection[EngineKey] = ()
    ) -> Route | None:
        """An engine for all tokens that the request has so far; one that drains only where nobody else can take it.

        None: nobody can take it now.
        """
        return self._route(_staying(engines), wanted, avoid) or self._route(engines, wanted, avoid)

    def _route(self, engines: Sequence[EngineView], wanted: RoutingQuery, avoid: Collection[EngineKey]) -> Route | None:
        best = self._best(self._options(engines, wanted, avoid), wanted)
        if best is not None:
            if best.path is Path.LOCAL_PREFILL:
                reason = "cheaper"
            else:
                reason = "prefix-hit" if best.placement.uncached < wanted.num_tokens else "least-loaded"
            return Route(best.placement, best.path is Path.DISAGGREGATED, best.path, reason)
        best = self._best(self._local_options(engines, wanted, avoid), wanted)
        if best is None:
            return None
        return Route(best.placement, False, Path.LOCAL_PREFILL, NO_PREFILL_ENGINE)

    def decode_placement(
        self,
        engines: Sequence[EngineView],
        wanted: RoutingQuery,
        source: EngineRecord,
        avoid: Collection[EngineKey] = (),
    ) -> Placement | None:
        """A decode engine that can read the KV that the engine `source` holds; see `route` for those that drain."""
        staying = self._receiver(_staying(engines), wanted, source, avoid)
        return staying or self._receiver(engines, wanted, source, avoid)

    def _receiver(
        self, engines: Sequence[EngineView], wanted: RoutingQuery, source: EngineRecord, avoid: Collection[EngineKey]
    ) -> Placement | None:
        options = []
        for view in engines:
            record = view.record
            if not _pairs(source, record) or engine_key(record) in avoid:
                continue
            missing = self._missing(view, wanted)
            cost_s = self._receive_s(view, missing, same_node=record.node_id == source.node_id)
            options.append(_Option(_is_full(view, wanted.num_tokens), cost_s, Placement(record, 0)))
        best = self._best(options, wanted)
        return best.placement if best else None

    def _options(
        self, engines: Sequence[EngineView], wanted: RoutingQuery, avoid: Collection[EngineKey]
    ) -> list[_Option]:
        decoders = [
            view for view in engines if view.record.role is Role.DECODE and engine_key(view.record) not in avoid
        ]
        receivers = _Receivers(self, decoders, wanted)
        options = []
        for view in engines:
            record = view.record
            if engine_key(record) in avoid or record.role is Role.DECODE:
                continue
            reading, load, path = self._reading(view, wanted), self.loads.of(view), Path.UNIFIED
            if record.role is Role.UNIFIED:
                cost_s = self._cost.whole_s(load, reading)
            elif (receive_s := receivers.cheapest_s(record)) is not None:
                cost_s = self._cost.prefill_only_s(view, load, reading) + receive_s
                path = Path.DISAGGREGATED
            else:
                continue
            placement = Placement(record, reading.uncached, wanted.names)
            options.append(_Option(_is_full(view, wanted.num_tokens), cost_s, placement, path))
        if options:
            options += self._local_options(decoders, wanted, avoid, min_hit=WORTHWHILE_HIT)
        return options

    def _local_options(
        self, engines: Iterable[EngineView], wanted: RoutingQuery, avoid: Collection[EngineKey], min_hit: int = 0
    ) -> list[_Option]:
        """Decode engines that would read the prompt themselves."""
        options = []
        for view in engines:
            record = view.record
            if record.role is not Role.DECODE or engine_key(record) in avoid:
                continue
            if wanted.pinned_rank not in (None, record.rank):
                continue
            reading = self._reading(view, wanted)
            if reading.uncached > self._local_prefill_max_tokens or wanted.num_tokens - reading.uncached < min_hit:
                continue
            cost_s = self._cost.whole_s(self.loads.of(view), reading)
            placement = Placement(record, reading.uncached, wanted.names)
            options.append(_Option(_is_full(view, wanted.num_tokens), cost_s, placement, Path.LOCAL_PREFILL))
        return options

    def _best(self, options: Collection[_Option], wanted: RoutingQuery) -> _Option | None:
        """The cheapest; of those about as cheap, the first in the request's own order.

        An engine without room for the request's KV only if no other is there.
        """
        options = [option for option in options if not option.is_full] or options
        if not options:
            return None
        cheapest = min(options, key=lambda option: option.cost_s)
        limit_s = cheapest.cost_s + self._session_patience_s if wanted.session else cheapest.cost_s * EQUAL
        equals = [option for option in options if option.cost_s <= limit_s and option.path is cheapest.path]
        return min(equals, key=lambda option: _order(wanted.tie, option.placement.engine))

    def _reading(self, view: EngineView, wanted: RoutingQuery) -> PrefillEstimate:
        return self._cost.reading(view, wanted.num_tokens, self._found(view, wanted))

    def _missing(self, view: EngineView, wanted: RoutingQuery) -> int:
        """Tokens that a hand-off has to bring: it looks into the pool only."""
        return wanted.num_tokens - self._found(view, wanted).pool * BLOCK_SIZE

    def _found(self, view: EngineView, wanted: RoutingQuery) -> FoundPrefix:
        return self.loads.find_prefix(view.cached, engine_key(view.record), wanted.names)

    def _receive_s(self, view: EngineView, missing: int, *, same_node: bool) -> float:
        """Of a decode engine: handoff + decode."""
        return self._cost.handoff_s(view, missing, same_node=same_node) + self._cost.decode_s(self.loads.of(view))


class _Receivers:
    """The cheapest decode engine for each prefill engine, without a look at every pair.

    A link is within a node or between nodes, so each decode engine has two costs.
    """

    def __init__(self, router: Router, decoders: Iterable[EngineView], wanted: RoutingQuery) -> None:
        near: defaultdict[tuple[str, str], list[float]] = defaultdict(list)  # by fingerprint and node
        far: defaultdict[str, list[float]] = defaultdict(list)
        for view in decoders:
            record, missing = view.record, router._missing(view, wanted)
            near[record.fingerprint, record.node_id].append(router._receive_s(view, missing, same_node=True))
            far[record.fingerprint].append(router._receive_s(view, missing, same_node=False))
        self._near_s = {place: min(costs_s) for place, costs_s in near.items()}
        self._far_s = {fingerprint: min(costs_s) for fingerprint, costs_s in far.items()}

    def cheapest_s(self, source: EngineRecord) -> float | None:
        """None: no decode engine can read its KV."""
        far_s = self._far_s.get(source.fingerprint)
        if far_s is None:
            return None
        return min(far_s, self._near_s.get((source.fingerprint, source.node_id), far_s))


def prefix_names(prompt: Sequence[int], sampling: SamplingParams, salt: str) -> bytes:
    """Return the packed names of the prompt's full blocks that an engine may find in its cache: none where every
    position has to run. Takes about a microsecond a block: computed once a prompt, however many choices it has.
    """
    if sampling.prompt_logprobs is not None:
        return b""
    findable = prompt[: (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE]
    return pack_names(block_hashes(findable, BLOCK_SIZE, salt))


def _staying(engines: Sequence[EngineView]) -> list[EngineView]:
    return [view for view in engines if not view.record.draining]


def num_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def _pairs(source: EngineRecord, record: EngineRecord) -> bool:
    return record.role is Role.DECODE and record.fingerprint == source.fingerprint


def _is_full(view: EngineView, tokens: int) -> bool:
    return view.stats is not None and view.stats.num_blocks_free * BLOCK_SIZE < tokens


def _order(tie: str, engine: EngineRecord) -> bytes:
    """Rendezvous hashing: where an engine leaves, only those move for whom it was the first."""
    return hashlib.blake2b(f"{tie}/{engine.engine_id}/{engine.epoch}".encode(), digest_size=8).digest()

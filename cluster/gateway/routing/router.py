"""The router: chooses the engine or pair of engines that serves a request in the fewest seconds (`cost.py`).

Cached prefixes cost nothing, and those in tiers little. A gateway knows about engines only what they report, so a new
one knows what the others know as soon as it is connected. Requests that it has sent, and that engines have not reported
yet, are in `load.py` and `prefix_index.py`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from baton.cluster.cached_blocks import BlockName
from baton.cluster.contracts import EngineRecord, EngineView, Role
from baton.engine.core.block_log import unpack_names
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineRequest
from baton.kv_transfer.protocol.messages import EngineKey

from .cost import Cost, PrefillWork
from .load import LoadTracker, Placement
from .prefix_index import PrefixIndex, prefix_names
from .rates import CostRates, LearntRates
from .receivers import DecodeCandidate, Handoff, Receivers

EQUAL = 1.05  # costs within this ratio are equal: gateways with equal reports must not all choose the same engine
NO_PREFILL_ENGINE = "no-prefill-engine"
SLOW_HANDOFF = "slow-handoff"
MEASURING = "measuring"
WORTHWHILE_HIT = 256  # cached tokens from which on a decode engine may compute a prompt at lower cost
SLOW_SHARE = 0.15  # of the time to compute a prompt: hand-offs that take no longer are made without comparing costs
LINK_TRIAL_SHARE = 1 / 600  # extra cost of a hand-off that is only made to measure / time from it to the next one
ENGINE_TRIAL_SHARE = 1 / 300  # extra cost of a request as a trial of a slow engine / age of that engine's figures


class Path(enum.StrEnum):
    """The ways to serve a request, as `x-baton-path` names them."""

    DISAGGREGATED = "disaggregated"  # a prefill engine computes the prompt, a decode engine continues
    UNIFIED = "unified"
    LOCAL_PREFILL = "local-prefill"  # a decode engine does both: there is no prefill engine, or it would cost more
    LOCAL_DECODE = "local-decode"  # a prefill engine does both: a hand-off would cost more
    RECOMPUTED = "recomputed"  # an attempt was lost, and another engine computes all tokens up to then


@dataclass(frozen=True)
class RoutingQuery:
    """The facts about a request that the router needs."""

    num_tokens: int
    names: Sequence[BlockName]  # of the prompt's full blocks that an engine may find in its cache
    tie: str  # determines the order among engines of equal cost
    session: bool = False  # `tie` is the session's, so the same engine comes first for all of its requests
    pinned_rank: int | None = None  # of the engine that must take part

    def with_tokens(self, num_tokens: int) -> RoutingQuery:
        return dataclasses.replace(self, num_tokens=num_tokens)


@dataclass(frozen=True)
class Route:
    """The engine that computes a request's next tokens."""

    placement: Placement
    hands_off: bool  # the engine only prefills; a decode engine is chosen when its KV is ready
    path: Path
    reason: str


@dataclass(frozen=True)
class _Option:
    is_full: bool  # the engine has no room for the request's KV now
    cost_s: float
    placement: Placement
    path: Path = Path.DISAGGREGATED
    reason: str = ""  # empty: the reason says whether a part of the prompt is cached
    handoff: Handoff | None = None

    def route(self, query: RoutingQuery) -> Route:
        found = "prefix-hit" if self.placement.uncached < query.num_tokens else "least-loaded"
        return Route(self.placement, self.handoff is not None, self.path, self.reason or found)


@dataclass(slots=True)
class _LinkTrials:
    """Hand-offs that are only made to measure. All cost `LINK_TRIAL_SHARE` of the time: one delays the next."""

    next_s: float = -math.inf  # the time from which on another one may be made


class Router:
    """Chooses engines for the requests of one gateway."""

    def __init__(
        self,
        gateway_id: str,
        *,
        rates: LearntRates,
        session_patience_s: float,
        local_prefill_max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway_id = gateway_id
        self._rates, self._cost = rates, Cost(rates)
        self._clock, self._began_s = clock, clock()
        self._source_trials, self._reader_trials = _LinkTrials(), _LinkTrials()
        self._session_patience_s = session_patience_s
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self.prefixes = PrefixIndex(clock)
        self.loads = LoadTracker(self.prefixes)

    def reconfigure(self, guesses: CostRates, session_patience_s: float, local_prefill_max_tokens: int) -> None:
        """Use other settings from the next choice on."""
        self._rates.reconfigure(guesses)
        self._session_patience_s = session_patience_s
        self._local_prefill_max_tokens = local_prefill_max_tokens

    def query(
        self,
        request: EngineRequest,
        names: Sequence[BlockName] | None = None,
        *,
        session_id: str | None = None,
        pinned_rank: int | None = None,
    ) -> RoutingQuery:
        """Return the query for a request. `names` are those of the prompt's blocks, if they are known already."""
        if names is None:
            packed = prefix_names(request.prompt_token_ids, request.sampling, request.cache_salt)
            names = unpack_names(packed)
        tie = f"{self._gateway_id}/{request.request_id}" if session_id is None else f"session/{session_id}"
        return RoutingQuery(num_tokens(request), names, tie, session_id is not None, pinned_rank)

    def route(
        self, engines: Sequence[EngineView], query: RoutingQuery, avoid: Collection[EngineKey] = ()
    ) -> Route | None:
        """Return an engine for all of the request's tokens up to now, or None if no engine can take it now.

        A draining engine is chosen only if no other one can take it.
        """
        self._rates.renew(engines)
        return self._route(_staying(engines), query, avoid) or self._route(engines, query, avoid)

    def _route(self, engines: Sequence[EngineView], query: RoutingQuery, avoid: Collection[EngineKey]) -> Route | None:
        options = self._options(engines, query, avoid)
        best = self._best(options, query)
        if best is not None:
            tried = self._link_trial(self._source_trials, options, best, query)
            tried = tried or self._engine_trial(engines, options, best)
            return (tried or best).route(query)
        best = self._best(self._local_options(engines, query, avoid), query)
        return None if best is None else best.route(query)

    def _link_trial(
        self, trials: _LinkTrials, options: Collection[_Option], best: _Option, query: RoutingQuery
    ) -> _Option | None:
        """Return a hand-off to be made although it costs more, so that the link is measured again; or None.

        If `best` is a hand-off too, only those are tried that a stale figure makes slower: nothing else would ever
        measure them again. A link is due once the extra cost is at most `LINK_TRIAL_SHARE` of the age of its figure, so
        long prompts are seldom used. Of links that are due, each request tries another one: always trying the cheapest
        would never measure the others.
        """
        now_s = self._clock()
        if now_s < trials.next_s:
            return None
        due = [
            option
            for option in options
            if (handoff := option.handoff) is not None
            and not option.is_full
            and (best.handoff is None or handoff.is_slow_beside(best.handoff))
            and option.cost_s - best.cost_s <= LINK_TRIAL_SHARE * (now_s - max(self._began_s, handoff.measured_s))
        ]
        if not due:
            return None
        tried = min(due, key=lambda option: _order(query.tie, option.placement.engine))
        trials.next_s = now_s + (tried.cost_s - best.cost_s) / LINK_TRIAL_SHARE
        return dataclasses.replace(tried, reason=MEASURING)

    def _engine_trial(
        self, engines: Sequence[EngineView], options: Collection[_Option], best: _Option
    ) -> _Option | None:
        """Return an option to be taken although it costs more, to measure a slow engine with stale figures; or None.

        An engine has one trial at a time, and after `SETTLED` of them its figures are fresh. So all trials together
        cost at most `SETTLED` * `ENGINE_TRIAL_SHARE` of the time.
        """
        for view in engines if self._rates.stale else ():
            key = view.record.key
            if key not in self._rates.stale:
                continue
            load = self.loads.of(view)
            prefill_age_s = 0.0 if load.queued_tokens else self._rates.slow_prefill_age_s(view)
            decode_age_s = 0.0 if load.num_requests else self._rates.slow_decode_age_s(view)
            for option in options:
                age_s = prefill_age_s if option.handoff is not None else max(prefill_age_s, decode_age_s)
                if option.placement.engine.key == key and _is_worth_trying(option, best, age_s):
                    return dataclasses.replace(option, reason=MEASURING)
        return None

    def decode_placement(
        self,
        engines: Sequence[EngineView],
        query: RoutingQuery,
        source: EngineRecord,
        avoid: Collection[EngineKey] = (),
    ) -> Placement | None:
        """Return a decode engine that can fetch the KV of `source`; as in `route`, draining engines come last."""
        staying = self._receiver(_staying(engines), query, source, avoid)
        return staying or self._receiver(engines, query, source, avoid)

    def _receiver(
        self, engines: Sequence[EngineView], query: RoutingQuery, source: EngineRecord, avoid: Collection[EngineKey]
    ) -> Placement | None:
        options = []
        ages_s: dict[EngineKey, float] = {}  # of stale figures of idle engines that decoded slowly
        for view in engines:
            record, load = view.record, self.loads.of(view)
            if not _pairs(source, record) or record.key in avoid:
                continue
            candidate = self._as_candidate(view, query)
            handoff_s = self._cost.handoff_s(view, source, candidate.missing)
            handoff = candidate.handoff(source, handoff_s, self._rates)
            is_full = _is_full(view, query.num_tokens)
            options.append(_Option(is_full, handoff.cost_s, Placement(record, 0), handoff=handoff))
            if record.key in self._rates.stale and not load.num_requests:
                ages_s[record.key] = self._rates.slow_decode_age_s(view)
        if (best := self._best(options, query)) is None:
            return None
        for option in options if ages_s else ():
            if _is_worth_trying(option, best, ages_s.get(option.placement.engine.key, 0.0)):
                return option.placement
        return (self._link_trial(self._reader_trials, options, best, query) or best).placement

    def _options(
        self, engines: Sequence[EngineView], query: RoutingQuery, avoid: Collection[EngineKey]
    ) -> list[_Option]:
        decoders = [view for view in engines if view.record.role is Role.DECODE and view.record.key not in avoid]
        receivers = Receivers((self._as_candidate(view, query) for view in decoders), self._cost, self._rates)
        options = []
        for view in engines:
            record = view.record
            if record.key in avoid or record.role is Role.DECODE:
                continue
            work, load = self._prefill_work(view, query), self.loads.of(view)
            placement = Placement(record, work.uncached, query.names)
            is_full = _is_full(view, query.num_tokens)
            if record.role is Role.UNIFIED:
                options.append(_Option(is_full, self._cost.whole_s(view, load, work), placement, Path.UNIFIED))
                continue
            ready_s = self._cost.ready_s(view, load, work)
            if (handoff := receivers.cheapest(record, load.num_requests, ready_s)) is None:
                continue
            cost_s = ready_s + self._cost.release_s(view) + handoff.cost_s
            options.append(_Option(is_full, cost_s, placement, handoff=handoff))
            is_slow = self._is_slow(handoff.seconds, self._rates.prefill_s(view, query.num_tokens))
            if is_slow and query.pinned_rank in (None, record.rank):
                cost_s = self._cost.whole_s(view, load, work)
                options.append(_Option(is_full, cost_s, placement, Path.LOCAL_DECODE, SLOW_HANDOFF))
        if options:
            slow_s = min((option.handoff.seconds for option in options if option.handoff is not None), default=0.0)
            options += self._local_options(decoders, query, avoid, min_hit=WORTHWHILE_HIT, slow_s=slow_s)
        return options

    def _local_options(
        self,
        engines: Iterable[EngineView],
        query: RoutingQuery,
        avoid: Collection[EngineKey],
        *,
        min_hit: int = 0,
        slow_s: float = 0.0,
    ) -> list[_Option]:
        """Return the options in which decode engines compute the prompt themselves.

        Engines that have less than `min_hit` of it are included only if a hand-off, which takes `slow_s`, is slow.
        """
        options = []
        for view in engines:
            record = view.record
            if record.role is not Role.DECODE or record.key in avoid:
                continue
            if query.pinned_rank not in (None, record.rank):
                continue
            work = self._prefill_work(view, query)
            if work.uncached > self._local_prefill_max_tokens:
                continue
            if not min_hit:
                reason = NO_PREFILL_ENGINE
            elif query.num_tokens - work.uncached >= min_hit:
                reason = "cheaper"
            elif self._is_slow(slow_s, self._cost.compute_s(view, work)):
                reason = SLOW_HANDOFF
            else:
                continue
            cost_s = self._cost.whole_s(view, self.loads.of(view), work)
            placement = Placement(record, work.uncached, query.names)
            is_full = _is_full(view, query.num_tokens)
            options.append(_Option(is_full, cost_s, placement, Path.LOCAL_PREFILL, reason))
        return options

    def _is_slow(self, handoff_s: float, compute_s: float) -> bool:
        return handoff_s > max(SLOW_SHARE * compute_s, self._rates.guesses.slow_handoff_s)

    def _best(self, options: Collection[_Option], query: RoutingQuery) -> _Option | None:
        """Return the cheapest option; among equal ones, the first in the request's own order of engines.

        An engine without room for the request's KV is taken only if there is no other one.
        """
        options = [option for option in options if not option.is_full] or options
        if not options:
            return None
        cheapest = min(options, key=lambda option: option.cost_s)
        limit_s = cheapest.cost_s + self._session_patience_s if query.session else cheapest.cost_s * EQUAL
        hands_off = cheapest.handoff is not None
        equals = [
            option for option in options if option.cost_s <= limit_s and (option.handoff is not None) is hands_off
        ]
        return min(equals, key=lambda option: _order(query.tie, option.placement.engine))

    def _prefill_work(self, view: EngineView, query: RoutingQuery) -> PrefillWork:
        found = self.prefixes.find(view.cached, view.record.key, query.names)
        return self._cost.prefill_work(view, query.num_tokens, found)

    def _missing(self, view: EngineView, query: RoutingQuery) -> int:
        """Return how many tokens a hand-off has to transfer: all but those in the pool, since it ignores tiers."""
        return query.num_tokens - self.prefixes.count_present(view.cached, view.record.key, query.names) * BLOCK_SIZE

    def _as_candidate(self, view: EngineView, query: RoutingQuery) -> DecodeCandidate:
        return DecodeCandidate(view, self._missing(view, query), self._cost.decode_s(view, self.loads.of(view)))


def _is_worth_trying(option: _Option, best: _Option, age_s: float) -> bool:
    """Return whether a request may take this option as a trial of an engine whose figures have this age; 0: fresh."""
    return not option.is_full and 0 < option.cost_s - best.cost_s <= ENGINE_TRIAL_SHARE * age_s


def _staying(engines: Sequence[EngineView]) -> list[EngineView]:
    return [view for view in engines if not view.record.draining]


def num_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def _pairs(source: EngineRecord, record: EngineRecord) -> bool:
    return record.role is Role.DECODE and record.fingerprint == source.fingerprint


def _is_full(view: EngineView, tokens: int) -> bool:
    return view.stats is not None and view.stats.num_blocks_left * BLOCK_SIZE < tokens


def _order(tie: str, engine: EngineRecord) -> bytes:
    """Order engines by rendezvous hashing: when one leaves, only the requests that preferred it move."""
    return hashlib.blake2b(f"{tie}/{engine.engine_id}/{engine.epoch}".encode(), digest_size=8).digest()

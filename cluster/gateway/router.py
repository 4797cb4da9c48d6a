"""Chooses engines: the least loaded one, where a remembered prefix counts as work that need not be done.

Work is counted in tokens: those to prefill, and those of context that every decode step reads.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from baton.cluster.contracts import EngineRecord, EngineView, Role
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineRequest

from .prefixes import EngineKey, PrefixMemory, prefix_chain

ASSUMED_WORK = 512  # tokens of another gateway's request, about which we only know that it exists


class Path(enum.StrEnum):
    """How a request is served, as its `x-baton-path` says."""

    DISAGGREGATED = "disaggregated"  # one engine prefills, another decodes
    UNIFIED = "unified"
    LOCAL_PREFILL = "local-prefill"  # a decode engine does both, since no prefill engine is there
    RECOMPUTED = "recomputed"  # a first attempt was lost, an engine computes the tokens so far again


@dataclass(frozen=True)
class Placement:
    """A request on an engine."""

    engine: EngineRecord
    work: int  # tokens, beyond what is probably cached
    chain: Sequence[int] = ()  # prefixes that the engine will have cached


@dataclass(frozen=True)
class Route:
    """Where a request's next tokens come from."""

    placement: Placement
    hands_off: bool  # the engine only prefills; a decode engine is chosen when its KV is ready
    path: Path
    reason: str


def engine_key(record: EngineRecord) -> EngineKey:
    return record.engine_id, record.epoch


class Router:
    """One gateway's choices and what it learns from having made them."""

    def __init__(self, gateway_id: str, *, prefix_capacity: int, local_prefill_max_tokens: int) -> None:
        self._gateway_id = gateway_id
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._prefixes = PrefixMemory(prefix_capacity)
        self._work: Counter[EngineKey] = Counter()

    def route(
        self, engines: Sequence[EngineView], request: EngineRequest, avoid: Collection[EngineKey] = ()
    ) -> Route | None:
        """An engine for all tokens that the request has so far. None: nobody can take it now."""
        chain = prefix_chain(request.prompt_token_ids, (request.cache_salt, request.adapter_id))
        decoders = [view for view in engines if view.record.role is Role.DECODE]
        mates = {view.record.fingerprint for view in decoders}
        takes_prompts = [
            view
            for view in engines
            if view.record.role is Role.UNIFIED
            or (view.record.role is Role.PREFILL and view.record.fingerprint in mates)
        ]
        if best := self._cheapest(takes_prompts, request, chain, avoid):
            hands_off = best.engine.role is Role.PREFILL
            reason = "prefix-hit" if best.work < num_tokens(request) else "least-loaded"
            return Route(best, hands_off, Path.DISAGGREGATED if hands_off else Path.UNIFIED, reason)
        best = self._cheapest(decoders, request, chain, avoid)
        if best is None or best.work > self._local_prefill_max_tokens:
            return None
        return Route(best, False, Path.LOCAL_PREFILL, "no-prefill-engine")

    def decode_placement(
        self,
        engines: Sequence[EngineView],
        request: EngineRequest,
        fingerprint: str,
        avoid: Collection[EngineKey] = (),
    ) -> Placement | None:
        """A decode engine that can read KV with this fingerprint."""
        pairs = [view for view in engines if view.record.role is Role.DECODE and view.record.fingerprint == fingerprint]
        return self._cheapest(pairs, request, (), avoid)

    def started(self, placement: Placement) -> None:
        """Call `finished` once for each call of this."""
        key = engine_key(placement.engine)
        self._work[key] += placement.work
        self._prefixes.remember(placement.chain, key)

    def finished(self, placement: Placement) -> None:
        key = engine_key(placement.engine)
        self._work[key] -= placement.work
        if not self._work[key]:
            del self._work[key]  # engines come and go

    def _cheapest(
        self,
        views: Iterable[EngineView],
        request: EngineRequest,
        chain: Sequence[int],
        avoid: Collection[EngineKey],
    ) -> Placement | None:
        """The engine that would be done first; one without room for the request's KV only if no other is there."""
        tokens = num_tokens(request)
        best: tuple[tuple[bool, int, bytes], Placement] | None = None
        for view in views:
            key = engine_key(view.record)
            if key in avoid:
                continue
            work = tokens - self._prefixes.cached_tokens(chain, key)
            cost = (_is_full(view, tokens), self._work[key] + _foreign_work(view) + work, self._tie(request, key))
            if best is None or cost < best[0]:
                best = cost, Placement(view.record, work, chain)
        return best[1] if best else None

    def _tie(self, request: EngineRequest, key: EngineKey) -> bytes:
        """Another order of the engines for each request: gateways that see the same must not all choose the same."""
        text = f"{self._gateway_id}/{request.request_id}/{key[0]}/{key[1]}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()


def num_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) + len(request.output_token_ids)


def _is_full(view: EngineView, tokens: int) -> bool:
    return view.stats is not None and view.stats.num_blocks_free * BLOCK_SIZE < tokens


def _foreign_work(view: EngineView) -> int:
    """What other gateways have in the engine, in tokens."""
    stats = view.stats
    if stats is None:
        return 0
    in_engine = stats.num_requests_running + stats.num_requests_waiting + stats.num_requests_waiting_for_kv
    return max(0, in_engine - view.outstanding) * ASSUMED_WORK

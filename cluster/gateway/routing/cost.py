"""The cost of serving a request in an engine, or a pair of engines, in seconds.

prefill engine P, decode engine D
    queue(P) + prefill(P) + restore(P) + release(P) + handoff(P, D) + decode(D)
unified engine, or decode engine that computes the prompt itself
    queue(E) + prefill(E) + restore(E) + stall(E) + decode(E)

queue    time to compute the tokens queued before the request
prefill  time to compute the request's own uncached tokens
restore  (1 + requests in E whose KV is on its way) x time to compute the tokens that tiers have x (time in which E
         lately restored a block / time in which it computed one; `UNTRIED` if unknown). If restoring takes no less
         time than computing, or the engine would not restore them, they count as uncached tokens instead
stall    prefill x requests in E x stall_weight: running answers wait for the prompt's chunks
release  share of P's blocks that wait for readers x block_release_s
handoff  handoff_s + time in which D reads from P the tokens that it lacks + time for the reads of earlier requests:
         those in D whose KV is on its way, and those in P, as far as their reads take longer than P needs to compute
         the prompt
decode   (requests in D x the time by which one more delays the answers of D) + the time by which D alone is slower

The times to compute, to read and to decode are measured (`rates.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.cluster.cached_blocks import FoundPrefix
from baton.cluster.contracts import EngineRecord, EngineView
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.tiers import Tier, TierStats

from .rates import LearntRates

UNTRIED = 0.5  # restoring / computing a block in an engine that has restored none yet: low, so that it tries


@dataclass(frozen=True)
class Load:
    """The load of one engine, as far as one gateway knows it."""

    num_requests: int  # this gateway's own, and those of other gateways as of the engine's newest report
    queued_tokens: int  # prompt tokens to be computed before those of the next request


@dataclass(frozen=True)
class PrefillWork:
    """The work that an engine would have with a prompt."""

    uncached: int  # tokens to compute
    restore_s: float = 0.0  # time to restore blocks from tiers before


class Cost:
    """Computes the terms of the formula at the top of this file."""

    def __init__(self, rates: LearntRates) -> None:
        self._rates = rates

    def prefill_work(self, view: EngineView, num_tokens: int, found: FoundPrefix) -> PrefillWork:
        """Return the work for a prompt of `num_tokens`, of which the engine has the prefix `found`."""
        uncached = num_tokens - found.pool * BLOCK_SIZE
        stats, restorable = view.stats, found.in_tiers * BLOCK_SIZE
        if not restorable or stats is None or stats.tiers is None:
            return PrefillWork(uncached)
        share = (1 + stats.num_requests_waiting_for_kv) * _restoring_share(stats.tiers, found)
        if restorable < stats.tiers.min_tokens or not stats.tiers.answers or share >= 1:
            return PrefillWork(uncached)
        return PrefillWork(uncached - restorable, self._rates.prefill_s(view, restorable) * share)

    def ready_s(self, view: EngineView, load: Load, work: PrefillWork) -> float:
        """Return queue + prefill + restore."""
        return self._rates.prefill_s(view, load.queued_tokens + work.uncached) + work.restore_s

    def whole_s(self, view: EngineView, load: Load, work: PrefillWork) -> float:
        """Return queue + prefill + restore + stall + decode."""
        stall_s = self.compute_s(view, work) * load.num_requests * self._rates.guesses.stall_weight
        return self.ready_s(view, load, work) + stall_s + self.decode_s(view, load)

    def compute_s(self, view: EngineView, work: PrefillWork) -> float:
        """Return prefill."""
        return self._rates.prefill_s(view, work.uncached)

    def handoff_s(
        self, view: EngineView, source: EngineRecord, missing: int, *, before: int = 0, ready_s: float = 0.0
    ) -> float:
        """Return handoff. `before` requests are in `source`, which takes `ready_s` to compute these and the prompt."""
        read_s = self._rates.read_s(view, source)
        ahead = before + (0 if view.stats is None else view.stats.num_requests_waiting_for_kv)
        wait_s = max(0.0, ahead * missing * read_s.unit_s - ready_s)
        return self._rates.guesses.handoff_s + wait_s + read_s.at(missing)

    def decode_s(self, view: EngineView, load: Load) -> float:
        return load.num_requests * self._rates.request_s(view) + self._rates.slowness_s(view)

    def release_s(self, view: EngineView) -> float:
        stats = view.stats
        if stats is None or not stats.num_blocks:
            return 0.0
        return self._rates.guesses.block_release_s * stats.num_blocks_held / stats.num_blocks


def _restoring_share(tiers: TierStats, found: FoundPrefix) -> float:
    """Return time to restore all found blocks / time to compute them. The engine decides by the same ratio."""
    blocks = ((found.host, Tier.HOST), (found.disk, Tier.DISK))
    # A share may be infinite if a block was computed in no time to speak of.
    return sum(count * _block_share(tiers, tier) for count, tier in blocks if count) / found.in_tiers


def _block_share(tiers: TierStats, tier: Tier) -> float:
    restore_s = tiers.restore_s.get(tier)
    return UNTRIED if restore_s is None or not tiers.compute_s else restore_s / tiers.compute_s

"""The cost of serving a request in an engine, or a pair of engines, in seconds.

prefill engine P, decode engine D
    queue(P) + prefill(P) + restore(P) + release(P) + handoff(P, D) + decode(D)
unified engine, or decode engine that computes the prompt itself
    queue(E) + prefill(E) + restore(E) + stall(E) + decode(E)

queue    the time to compute the tokens before it
prefill  the time to compute its own uncached tokens
restore  (1 + requests in E whose KV is on its way) x time to compute tokens that tiers have x what restoring a block
         took there lately / what computing one did (`UNTRIED` where it is not known). Where that is no less than
         to compute them, or the engine would not restore them, they are computed: then they count as uncached
stall    prefill x requests in E x stall_weight: answers that are being written wait for the prompt's chunks
release  share of P's blocks that wait for readers x block_release_s
handoff  handoff_s + the time in which D reads from P the tokens that it lacks + the time in which it reads those of
         requests before this one: requests in D whose KV is on its way, and those in P, as far as that takes longer
         than P needs to compute the prompt
decode   (requests in D x the time by which one more delays the answers of D) + the time by which D alone is slower

Times to compute, to read and to decode are measured (`rates.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.cluster.cached_blocks import FoundPrefix
from baton.cluster.contracts import EngineRecord, EngineView
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.tiers import Tier, TierStats

from .rates import LearntRates

UNTRIED = 0.5  # of the time to compute a block: an engine without a measurement restores it to get one


@dataclass(frozen=True)
class Load:
    """The load of one engine, as one gateway knows it."""

    num_requests: int  # this gateway's, and those of others as of the engine's newest report
    queued_tokens: int  # tokens of prompts to compute before the next one


@dataclass(frozen=True)
class PrefillWork:
    """The work of an engine to compute a prompt."""

    uncached: int  # tokens to compute
    restore_s: float = 0.0  # to restore blocks from tiers first


class Cost:
    """Computes the terms of the formula above."""

    def __init__(self, rates: LearntRates) -> None:
        self._rates = rates

    def prefill_work(self, view: EngineView, num_tokens: int, found: FoundPrefix) -> PrefillWork:
        """Return the work for a prompt of `num_tokens`, of which the engine has what was found."""
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
        """Return handoff. `before` requests are in `source`, which needs `ready_s` to compute them and the prompt."""
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
    """Return the time to restore all found blocks over the time to compute them, by which the engine decides too."""
    taken = found.host * _block_share(tiers, Tier.HOST) + found.disk * _block_share(tiers, Tier.DISK)
    return taken / found.in_tiers


def _block_share(tiers: TierStats, tier: Tier) -> float:
    restore_s = tiers.restore_s.get(tier)
    return UNTRIED if restore_s is None or not tiers.compute_s else restore_s / tiers.compute_s

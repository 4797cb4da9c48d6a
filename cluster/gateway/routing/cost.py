"""The cost of serving a request in an engine, or a pair of engines, in seconds.

prefill engine P, decode engine D
    queue(P) + prefill(P) + restore(P) + release(P) + handoff(P, D) + decode(D)
unified engine, or decode engine that computes the prompt itself
    queue(E) + prefill(E) + restore(E) + stall(E) + decode(E)

queue    uncached tokens before it / prefill_tokens_per_s
prefill  its own uncached tokens / prefill_tokens_per_s
restore  (1 + requests in E whose KV is on its way) x tokens that tiers have / prefill_tokens_per_s x what restoring a
         block took there lately / what computing one did (`UNTRIED` where it is not known). Where that is no less than
         to compute them, or the engine would not restore them, they are computed: then they count as uncached
stall    prefill x requests in E x stall_weight: answers that are being written wait for the prompt's chunks
release  share of P's blocks that wait for readers x block_release_s
handoff  handoff_s + (1 + requests in D whose KV is on its way) x tokens that D lacks / rate of the link
decode   requests in D x decode_request_s
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from baton.cluster.cached_blocks import FoundPrefix
from baton.cluster.contracts import EngineView
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.tiers import Tier, TierStats
from baton.engine.strict_model import StrictModel

UNTRIED = 0.5  # of the time to compute a block: an engine without a measurement restores it to get one


class CostRates(StrictModel):
    """The rates of the cost formula. Defaults: an 8B model on H200s, NVLink within a node, 400 Gbit/s between nodes.

    Only their proportions decide. A factor of two is precise enough.
    """

    prefill_tokens_per_s: float = Field(20_000.0, gt=0)  # of one engine
    decode_request_s: float = Field(0.01, ge=0)  # that one more request delays the answers of an engine
    stall_weight: float = Field(1.0, ge=0)  # a second without tokens for a running answer, in seconds of this cost
    block_release_s: float = Field(1.0, ge=0)  # until a prefill engine full of held blocks has room again
    handoff_s: float = Field(0.003, ge=0)  # of a hand-off without its bytes
    node_tokens_per_s: float = Field(1_000_000.0, gt=0)  # KV of so many tokens between engines of one node
    network_tokens_per_s: float = Field(250_000.0, gt=0)  # between nodes


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

    def __init__(self, rates: CostRates) -> None:
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
        return PrefillWork(uncached - restorable, self._prefill_s(restorable) * share)

    def prefill_only_s(self, view: EngineView, load: Load, work: PrefillWork) -> float:
        """Return queue + prefill + restore + release."""
        return self._prefill_s(load.queued_tokens + work.uncached) + work.restore_s + self._release_s(view)

    def whole_s(self, load: Load, work: PrefillWork) -> float:
        """Return queue + prefill + restore + stall + decode."""
        stall_s = self._prefill_s(work.uncached) * load.num_requests * self._rates.stall_weight
        prefill_s = self._prefill_s(load.queued_tokens + work.uncached)
        return prefill_s + work.restore_s + stall_s + self.decode_s(load)

    def handoff_s(self, view: EngineView, missing: int, *, same_node: bool) -> float:
        rate = self._rates.node_tokens_per_s if same_node else self._rates.network_tokens_per_s
        ahead = 0 if view.stats is None else view.stats.num_requests_waiting_for_kv
        return self._rates.handoff_s + (1 + ahead) * missing / rate

    def decode_s(self, load: Load) -> float:
        return load.num_requests * self._rates.decode_request_s

    def _prefill_s(self, num_tokens: int) -> float:
        return num_tokens / self._rates.prefill_tokens_per_s

    def _release_s(self, view: EngineView) -> float:
        stats = view.stats
        if stats is None or not stats.num_blocks:
            return 0.0
        return self._rates.block_release_s * stats.num_blocks_held / stats.num_blocks


def _restoring_share(tiers: TierStats, found: FoundPrefix) -> float:
    """Return the time to restore all found blocks over the time to compute them, by which the engine decides too."""
    taken = found.host * _block_share(tiers, Tier.HOST) + found.disk * _block_share(tiers, Tier.DISK)
    return taken / found.in_tiers


def _block_share(tiers: TierStats, tier: Tier) -> float:
    restore_s = tiers.restore_s.get(tier)
    return UNTRIED if restore_s is None or not tiers.compute_s else restore_s / tiers.compute_s

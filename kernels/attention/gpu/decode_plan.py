"""Work partition of decode attention: which program reads which keys. Planned on the device, once per step.

    keys       |  sequence 0                     |  sequence 1 |  sequence 2 (padding)
    units      | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 0 | 1 | 2 | 0 |      `unit_tokens` keys each, the last one fewer
    shares     |  share 0      |  share 1      |  share 2      |share 3    `per_share` units each

Every program has one share of the keys of the whole step, for one KV head. There are as many programs as the device
runs concurrently, so that all end together, whatever the lengths: one sequence of 32k keys, or hundreds of short ones.

A share may begin and end in the middle of a sequence. Its results for those two sequences are *partial*: they stay in a
workspace until the last program with a part of that sequence combines the parts. `arrivals` finds that program. The
counter of a sequence is the one of the share where it begins; at most one sequence that begins in a share continues in
the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.launch import multiprocessors
from baton.kernels.query_tiles import PrefillPlan

from ..rule import UNLIMITED

# int32 words of a share
SHARE_WORDS = tl.constexpr(4)
FIRST_SEQ, FIRST_UNIT, NUM_UNITS, UNITS_PER_SHARE = (tl.constexpr(word) for word in range(SHARE_WORDS.value))
SEQUENCES_AT_ONCE = 256


@dataclass(frozen=True)
class Shares:
    """The keys that layers with a certain window read, in equal shares."""

    words: Tensor  # [num_shares, SHARE_WORDS] int32; 0 units: nothing to do
    arrivals: Tensor  # [num_shares, num_heads] int32: stored parts of the sequence that continues after the share
    unit_tokens: int

    @property
    def num_shares(self) -> int:
        return self.words.shape[0]


@dataclass(frozen=True)
class DecodePlan:
    """The plan for the decodes of one step, or for all its sequences if each has only a few queries.

    Layers with the same window use the same shares, which are made for the first of them.
    """

    seq_lens: Tensor  # [num_seqs] int32
    num_kv_heads: int
    num_shares: int
    unit_tokens: int
    min_units: int
    early_units: int  # units of a share that are prefetched
    apart: bool  # whether a second kernel combines parts
    options: dict[str, int]  # launch options of `decode`'s kernel
    # A share has up to two parts: 0 of the sequence that began in an earlier share, 1 of the one that continues.
    sums: Tensor  # [num_shares, 2, queries * num_heads, head_dim] float32: weighted sums of values
    tops: Tensor  # [2, num_shares, 2, queries * num_heads] float32: their top scores, their sums of weights
    queries: int = 1  # most queries of a sequence
    uses_tma: bool = False  # whether loader warps fetch pages by TMA: `decode_tma`
    by_window: dict[int, Shares] = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    def reach(self, window: int) -> int:
        """Return how many of a sequence's newest keys any of its queries sees. `window`: `AttentionRule.limit`."""
        return min(window + self.queries - 1, UNLIMITED)

    def shares(self, window: int) -> Shares:
        """Return the shares of the keys that queries with this window see. `window`: `AttentionRule.limit`."""
        if window not in self.by_window:
            self.by_window[window] = plan_shares(
                self.seq_lens,
                window=self.reach(window),
                unit_tokens=self.unit_tokens,
                min_units=self.min_units,
                num_shares=self.num_shares,
                num_heads=self.num_kv_heads,
            )
        return self.by_window[window]


@dataclass(frozen=True)
class ShortPlan:
    """The plan of a step with a single short decode, or a single short sequence with a few queries.

    It holds the workspace for the parts of the result.
    """

    sums: Tensor  # [splits, queries, num_heads, head_dim] float32: weighted sums of values
    tops: Tensor  # [2, splits, queries, num_heads] float32: their top scores, their sums of weights

    @property
    def splits(self) -> int:
        """The largest possible number of splits of the keys."""
        return self.sums.shape[0]

    @property
    def queries(self) -> int:
        """The largest number of queries."""
        return self.sums.shape[1]


@dataclass(frozen=True)
class AttentionPlans:
    """The plans of one step, shared by its layers; None if no sequence needs that kind of kernel."""

    decode: DecodePlan | ShortPlan | None
    prefill: PrefillPlan | None


def prepared(batch: AttentionBatch) -> AttentionPlans:
    """Return the plans of a batch. Raises `ValueError` for a batch that `prepare` has not seen."""
    if not isinstance(batch.prepared, AttentionPlans):
        raise ValueError("the batch has no plan for this device: give it to kernels.attention.prepare once a step")
    return batch.prepared


def plan_shares(
    seq_lens: Tensor, *, window: int, unit_tokens: int, min_units: int, num_shares: int, num_heads: int
) -> Shares:
    """Partition the newest `window` keys of every sequence of `seq_lens` [num_seqs] int32 over `num_shares` programs.

    A share has at least `min_units` units, so that a short step is not divided too finely. Every sequence has at least
    one unit, even without keys, so that some program writes its result. Arrival counters of the `num_heads` KV heads
    are set to 0, and every layer resets them. Reads shapes only, so a CUDA graph may capture it.

    Later kernels may read the words and `seq_lens` before they wait for their predecessor. So this kernel is launched
    without programmatic dependent launch: none of them starts before it has ended.
    """
    words = torch.empty((num_shares, SHARE_WORDS.value), dtype=torch.int32, device=seq_lens.device)
    arrivals = torch.empty((num_shares, num_heads), dtype=torch.int32, device=seq_lens.device)
    write_shares[(num_shares,)](
        seq_lens,
        words,
        arrivals,
        seq_lens.shape[0],
        num_shares,
        num_heads,
        window,
        min_units,
        UNIT=unit_tokens,
        BLOCK=SEQUENCES_AT_ONCE,
        num_warps=4,
    )
    return Shares(words, arrivals, unit_tokens)


def shares_that_fill(device: torch.device, num_heads: int, programs_per_multiprocessor: int) -> int:
    """Return the largest number of shares per KV head for which all programs run concurrently."""
    return max(1, multiprocessors(device) * programs_per_multiprocessor // num_heads)


@triton.jit
def part_number(share, begins):
    """Return the index of a part of `share`: of the sequence that `begins` in it, or of the one that began earlier."""
    return share * 2 + begins.to(tl.int32)


@triton.jit
def first_visible(seq_len, window):
    """Return the first key that a sequence's newest token sees."""
    return tl.maximum(seq_len - window, 0)


@triton.jit
def units_of(seq_len, window, UNIT: tl.constexpr):
    """Return the number of units with keys that a sequence's newest token sees. Units begin at multiples of UNIT."""
    return tl.maximum(tl.cdiv(seq_len, UNIT) - first_visible(seq_len, window) // UNIT, 1)


@triton.jit(do_not_specialize=["num_seqs", "num_shares", "num_heads", "window", "min_units"])
def write_shares(
    seq_lens,
    words,
    arrivals,
    num_seqs,
    num_shares,
    num_heads,
    window,
    min_units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one share per program: it counts the units of all sequences, and finds where its share begins."""
    share = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = 0
    for base in range(0, num_seqs, BLOCK):
        seq_len = tl.load(seq_lens + base + lane, mask=base + lane < num_seqs, other=0)
        total += tl.sum(tl.where(base + lane < num_seqs, units_of(seq_len, window, UNIT), 0), 0)
    per_share = tl.maximum(tl.cdiv(total, num_shares), min_units)
    begin = share * per_share

    first_seq, first_unit, passed = 0, 0, 0
    for base in range(0, num_seqs, BLOCK):
        seq = base + lane
        seq_len = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
        units = tl.where(seq < num_seqs, units_of(seq_len, window, UNIT), 0)
        after = passed + tl.cumsum(units, 0)
        before = after - units
        is_first = (before <= begin) & (begin < after)
        first_seq += tl.sum(tl.where(is_first, seq, 0), 0)
        first_unit += tl.sum(tl.where(is_first, begin - before, 0), 0)
        passed += tl.sum(units, 0)

    for base in range(0, num_heads, BLOCK):
        tl.store(arrivals + share * num_heads + base + lane, 0, mask=base + lane < num_heads)
    word = words + share * SHARE_WORDS
    tl.store(word + FIRST_SEQ, first_seq)
    tl.store(word + FIRST_UNIT, first_unit)
    tl.store(word + UNITS_PER_SHARE, per_share)
    tl.debug_barrier()
    # release order: kernels that start early read these words without waiting, once this program has ended
    tl.atomic_xchg(word + NUM_UNITS, tl.maximum(tl.minimum(total - begin, per_share), 0), sem="release")

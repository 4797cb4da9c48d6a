"""Combines the parts of decode attention: in the program that finishes last, or in a second kernel.

If a step has few sequences and one of them is long, that one lies in dozens of shares. The program that finishes last
would combine them alone, while all others are idle. In the second kernel, every query head of a sequence has a program.
It costs a launch in every layer, even in steps with nothing to combine, so it runs only if the plan says so.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous
from baton.kernels.split_kv import LOG2_E, LOWEST, merge_parts

from ..rule import AttentionRule
from .decode_output import write_rows
from .decode_plan import UNITS_PER_SHARE, DecodePlan, Shares, part_number, units_of

PARTS_AT_ONCE = 64
MOST_SEQS = 8  # steps with more sequences do not use the second kernel


def add_parts(out: Tensor, plan: DecodePlan, shares: Shares, rule: AttentionRule) -> None:
    """Write the rows of `out` [num_decodes, num_heads, D] whose keys were in several shares of `attend_share`."""
    num_heads, dim = out.shape[1:]
    num_seqs = plan.seq_lens.shape[0]
    add_parts_kernel[(num_seqs, num_heads)](
        out,
        *(rule.sinks, rule.v_scale),
        shares.words,
        plan.sums,
        plan.tops,
        plan.seq_lens,
        num_seqs,
        shares.num_shares,
        rule.limit,
        num_heads,
        SEQS=MOST_SEQS,
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        UNIT=shares.unit_tokens,
        PARTS=PARTS_AT_ONCE,
        num_warps=4,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_seqs", "num_shares", "window", "num_heads"])
def add_parts_kernel(
    out,
    sinks,
    v_scale,
    words,
    sums,
    tops,
    seq_lens,
    num_seqs,
    num_shares,
    window,
    num_heads,
    SEQS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Combine one query head of one sequence. Lengths determine its parts, as in `decode_plan.write_shares`."""
    let_next_start()
    seq, head = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, SEQS)
    seq_len = tl.load(seq_lens + lane, mask=lane < num_seqs, other=0)
    units = tl.where(lane < num_seqs, units_of(seq_len, window, UNIT), 0)
    begin = tl.sum(tl.where(lane < seq, units, 0), 0)
    end = begin + tl.sum(tl.where(lane == seq, units, 0), 0)
    per_share = tl.load(words + UNITS_PER_SHARE)
    first_share, last_share = begin // per_share, (end - 1) // per_share
    wait_for_previous()
    if last_share > first_share:
        dim = tl.arange(0, PADDED_DIM)[None, :]
        total = tl.zeros([PADDED_DIM], tl.float32)
        weight = tl.zeros([1], tl.float32)
        top = tl.full([1], LOWEST, tl.float32)
        for base in tl.range(first_share, last_share + 1, PARTS):
            share = base + tl.arange(0, PARTS)
            part = part_number(share, share == first_share) * num_heads + head
            is_there = share <= last_share
            tops_here = tl.load(tops + part, mask=is_there, other=LOWEST)
            weights = tl.load(tops + num_shares * 2 * num_heads + part, mask=is_there, other=0.0)
            mask = is_there[:, None] & (dim < DIM)
            values = tl.load(sums + part.to(tl.int64)[:, None] * DIM + dim, mask=mask, other=0.0)
            total, weight, top = merge_parts(total, weight, top, values, weights, tops_here)
        if sinks is not None:
            sink = tl.load(sinks + head) * LOG2_E
            new_top = tl.maximum(top, sink)
            weight = weight * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
            total *= tl.exp2(top - new_top)
        result = total / tl.where(weight == 0, 1.0, weight)
        if v_scale is not None:
            result *= tl.load(v_scale)
        column = tl.arange(0, PADDED_DIM)
        place = out + (seq.to(tl.int64) * num_heads + head) * DIM + column
        tl.store(place, result.to(out.dtype.element_ty), mask=column < DIM)


@triton.jit
def combine_parts(
    sums,
    tops,
    first_share,
    last_share,
    num_shares,
    place,
    sinks,
    v_scale,
    head,
    num_queries,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Combine the parts of a sequence that begins in `first_share` and ends in `last_share`, and write the result."""
    rows: tl.constexpr = QUERIES * GROUP
    row = tl.arange(0, PADDED_ROWS)[None, :]
    dim = tl.arange(0, PADDED_DIM)[None, None, :]
    total = tl.zeros([PADDED_ROWS, PADDED_DIM], tl.float32)
    weight = tl.zeros([PADDED_ROWS], tl.float32)
    top = tl.full([PADDED_ROWS], LOWEST, tl.float32)
    for base in tl.range(first_share, last_share + 1, PARTS, num_stages=3):
        share = base + tl.arange(0, PARTS)[:, None]
        part = (part_number(share, share == first_share) * HEADS + head) * rows + row
        is_real = (share <= last_share) & (row < rows)
        # bypass L1: other multiprocessors wrote these
        tops_here = tl.load(tops + part, mask=is_real, other=LOWEST, cache_modifier=".cg")
        weights = tl.load(tops + num_shares * 2 * HEADS * rows + part, mask=is_real, other=0.0, cache_modifier=".cg")
        values = tl.load(
            sums + part[:, :, None] * DIM + dim,
            mask=is_real[:, :, None] & (dim < DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        total, weight, top = merge_parts(total, weight, top, values, weights, tops_here)
    write_rows(total, weight, top, place, sinks, v_scale, head, GROUP, DIM, HEADS * GROUP * DIM, num_queries)

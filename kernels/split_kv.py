"""Split-KV: several programs share the keys of one sequence, and their partial results are merged afterwards.

    part      sums of values, sums of weights, and the top score that both are relative to       for a program's keys
    result    the parts, rescaled to the greatest top score and added; at the end, sums / weights

Scores are in units of log 2, since the device's exponential has base 2. Parts are added in the order of the keys, so
that the result does not depend on which program finishes last. Attention and MLA share this arithmetic, in Triton and
in Gluon. VALUE_DIM is the dimension of values in a part's sums: 1 if rows come first, 0 if they come last.

A row that has seen no key has weight 0, and any top score up to LOWEST, including minus infinity. A running part begins
with LOWEST, since -inf - -inf would be NaN.
"""

import math

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-1.0e38)  # below any score, but finite, so that LOWEST - LOWEST is 0


@triton.jit
def load_part(sums, weights, tops, mask, VALUE_DIM: tl.constexpr):
    """Load a part that another multiprocessor wrote, bypassing L1. Return (sums, weights, top scores).

    `sums`, `weights` and `tops` are pointers; `mask` [rows] is true for existing rows.
    """
    part_sums = tl.load(sums, mask=tl.expand_dims(mask, VALUE_DIM), other=0.0, cache_modifier=".cg")
    part_top = tl.load(tops, mask=mask, other=LOWEST, cache_modifier=".cg")
    part_weights = tl.load(weights, mask=mask, other=0.0, cache_modifier=".cg")
    return part_sums, part_weights, part_top


@triton.jit
def merge_part(sums, weights, top, part_sums, part_weights, part_top, VALUE_DIM: tl.constexpr):
    """Merge two parts into one: (sums, weights [rows], top scores [rows])."""
    new_top = tl.maximum(top, part_top)
    grow, shrink = tl.exp2(part_top - new_top), tl.exp2(top - new_top)
    sums = sums * tl.expand_dims(shrink, VALUE_DIM) + part_sums * tl.expand_dims(grow, VALUE_DIM)
    return sums, weights * shrink + part_weights * grow, new_top


@triton.jit
def merge_parts(sums, weights, top, part_sums, part_weights, part_tops):
    """Merge PARTS parts into a running one: (sums [rows, dims], weights [rows], top scores [rows]).

    The parts are [PARTS, rows, dims] and [PARTS, rows]. For a single row, the dimension of rows may be left out.
    """
    new_top = tl.maximum(top, tl.max(part_tops, 0))
    grow = tl.exp2(part_tops - new_top)
    shrink = tl.exp2(top - new_top)
    weights = weights * shrink + tl.sum(part_weights * grow, 0)
    if len(part_tops.shape) > 1:
        sums = sums * shrink[:, None] + tl.sum(part_sums * grow[:, :, None], 0)
    else:
        sums = sums * shrink + tl.sum(part_sums * grow[:, None], 0)
    return sums, weights, new_top


@triton.jit
def sum_parts(part_sums, part_weights, part_tops):
    """Merge all parts [PARTS, dims] of one row at once: (sums [dims], weight [], top score [])."""
    top = tl.max(part_tops, 0)
    grow = tl.exp2(part_tops - top)
    return tl.sum(part_sums * grow[:, None], 0), tl.sum(part_weights * grow, 0), top

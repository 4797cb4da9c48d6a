"""Weights in 8 bits with a scale for each 128 x 128 values, multiplied out in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.moe import weights

BLOCK = tl.constexpr(weights.BLOCK)


@triton.jit
def gate_up_scales(scale, expert, column, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Where the scales of these rows of `gate_up` begin: even ones are of gates, odd ones of ups."""
    ROWS: tl.constexpr = (COLUMNS + 2 * BLOCK - 1) // (2 * BLOCK) * 2
    DEEP: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
    row = column // (2 * BLOCK) * 2 + column % 2
    return scale + expert.to(tl.int64) * (ROWS * DEEP) + row * DEEP


@triton.jit
def down_scales(scale, expert, column, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Where the scales of these rows of `down` begin."""
    ROWS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    DEEP: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
    return scale + expert.to(tl.int64) * (ROWS * DEEP) + column // BLOCK * DEEP


@triton.jit
def widened(weight, scale_rows, start, DTYPE: tl.constexpr):
    """weight [columns, depth] in 8 bits, from `start` of the depth on and within one block of it, as DTYPE."""
    factor = tl.load(scale_rows + start // BLOCK)
    return (weight.to(tl.float32) * factor[:, None]).to(DTYPE)

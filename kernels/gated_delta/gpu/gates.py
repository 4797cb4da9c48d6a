"""Device functions for gates (computed from the outputs of projections) and for the key dimensions of heads.

A program has KEYS key dimensions, a power of two. Those past KEY_DIM are zeros in keys, queries and states, and are
neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl
from baton.kernels.split_kv import LOG2_E


@triton.jit
def log2_decay(decay, rate, bias):
    """Return the binary logarithm of a state's decay factor. `rate` is exp(log_rate), or None if `decay` is g."""
    value = decay.to(tl.float32) * LOG2_E
    if rate is not None:
        x = value + bias * LOG2_E
        value = -rate * (tl.maximum(x, 0.0) + _log2_of_1_plus(exp2_approximate(-tl.abs(x))))
    return value


@triton.jit
def _log2_of_1_plus(y):
    """Return log2(1 + y) for y from 0 to 1, within a few parts in 100 000.

    The error must be small beside the result: a decay near 1 is applied once for each token of a long text.
    """
    series = y * (LOG2_E - y * (LOG2_E / 2 - y * (LOG2_E / 3 - y * (LOG2_E / 4))))
    return tl.where(y < 1 / 32, series, _log2_up_to_2(1.0 + y))


@triton.jit
def _log2_up_to_2(x):
    """Return log2 of x from 1 to 2, within 2 ** -22. `tl.log2` takes tens of instructions and a branch per value."""
    if pdl.SUPPORTED:
        result = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.log2(x)
    return result


@triton.jit
def exp2_approximate(x):
    """Return 2 ** x, and 0 where that is no normal number: `tl.exp2` keeps denormal ones."""
    if pdl.SUPPORTED:
        result = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def write_strength(beta, rate, SCALE: tl.constexpr):
    """Return beta, computed from its logits unless `rate` is None."""
    value = beta.to(tl.float32)
    if rate is not None:
        value = SCALE / (1.0 + tl.exp(-value))
    return value


@triton.jit
def load_dims(cells, dim, KEY_DIM: tl.constexpr, KEYS: tl.constexpr):
    """Load `cells`; 0 where `dim`, which broadcasts to their shape, is past KEY_DIM."""
    if KEYS == KEY_DIM:
        values = tl.load(cells)
    else:
        values = tl.load(cells, mask=dim < KEY_DIM, other=0.0)
    return values


@triton.jit
def load_known_dims(cells, known, dim, KEY_DIM: tl.constexpr, KEYS: tl.constexpr):
    """Load `cells`; 0 where a token is not `known`, or `dim` is past KEY_DIM."""
    if KEYS == KEY_DIM:
        values = tl.load(cells, mask=known, other=0.0)
    else:
        values = tl.load(cells, mask=known & (dim < KEY_DIM), other=0.0)
    return values


@triton.jit
def store_dims(cells, values, dim, KEY_DIM: tl.constexpr, KEYS: tl.constexpr):
    """Store `values`, except where `dim` is past KEY_DIM."""
    if KEYS == KEY_DIM:
        tl.store(cells, values)
    else:
        tl.store(cells, values, mask=dim < KEY_DIM)


@triton.jit
def reciprocal_length(squares, eps, NORM: tl.constexpr):
    """Return the factors that normalize vectors with these sums of squares to length 1; ones without NORM."""
    length = tl.where(squares < 0.0, 0.0, 1.0)  # ones, in the layout of `squares`
    if NORM:
        length = tl.rsqrt(squares + eps)
    return length

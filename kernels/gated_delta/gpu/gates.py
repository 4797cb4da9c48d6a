"""Device functions for gates (computed from the outputs of projections) and for the key dimensions of heads.

A program has KEYS key dimensions, a power of two. Those past KEY_DIM are zeros in keys, queries and states, and are
neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.split_kv import LOG2_E


@triton.jit
def log2_decay(decay, rate, bias):
    """Return the binary logarithm of a state's decay factor. `rate` is exp(log_rate), or None if `decay` is g."""
    value = decay.to(tl.float32)
    if rate is not None:
        x = value + bias
        value = -rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    return value * LOG2_E


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
    length = tl.full(squares.shape, 1.0, tl.float32)
    if NORM:
        length = tl.rsqrt(squares + eps)
    return length

"""The gates of a kernel's tokens, out of what projections give, and the lengths of heads."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.split_kv import LOG2_E


@triton.jit
def log2_decay(decay, rate, bias):
    """Return the binary logarithm of what is kept of a state; `rate` is exp(log_rate), or None where decay is g."""
    value = decay.to(tl.float32)
    if rate is not None:
        x = value + bias
        value = -rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    return value * LOG2_E


@triton.jit
def write_strength(beta, rate):
    """Return beta, out of its logits unless `rate` is None."""
    value = beta.to(tl.float32)
    if rate is not None:
        value = 1.0 / (1.0 + tl.exp(-value))
    return value


@triton.jit
def reciprocal_length(squares, eps, NORM: tl.constexpr):
    """Return what makes vectors of length 1 of those whose squares sum up to `squares`; ones without NORM."""
    length = tl.full(squares.shape, 1.0, tl.float32)
    if NORM:
        length = tl.rsqrt(squares + eps)
    return length

"""Arithmetic of the sampling kernels: the noise of `sampling/noise.py`, and floats as integers of the same order.

The noise has the same integers as the reference, and float64 with the same rounding. Kernels that call `noise` must be
launched with `enable_fp_fusion=False`, since a fused multiply-add is rounded once instead of twice.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .. import noise as definition

MEMBERS = tl.constexpr(definition.MEMBERS)
LANES = tl.constexpr(definition.LANES)

_ROUNDS = tl.constexpr(definition.ROUNDS)
_MULTIPLIER_0, _MULTIPLIER_1 = (tl.constexpr(factor) for factor in definition.MULTIPLIERS)
_KEY_STEP_0, _KEY_STEP_1 = (tl.constexpr(step) for step in definition.KEY_STEPS)
_MEMBER_BITS = tl.constexpr(definition.MEMBER_BITS)
_DIGIT, _LEAST_DIGIT = (tl.constexpr(2.0**-bits) for bits in (32, 32 - definition.MEMBER_BITS))
_TERMS = tl.constexpr(definition.SERIES_TERMS)
_HALF_ROOT = tl.constexpr(math.sqrt(0.5))
_LOG_2 = tl.constexpr(math.log(2))


@triton.jit
def philox(counter, position, seed, level: tl.constexpr):
    """Return four uint32 words for each counter with first word `counter`; `position` and `seed` are int64."""
    c0, c1, c2, c3 = counter, _low(position), _high(position), tl.full([], level, tl.uint32)
    k0, k1 = _low(seed), _high(seed)
    for _ in tl.static_range(_ROUNDS):
        p0 = c0.to(tl.uint64) * _MULTIPLIER_0
        p1 = c2.to(tl.uint64) * _MULTIPLIER_1
        # In the first rounds, c1 and c3 are scalars, the same for all tokens, like the keys.
        c0, c1, c2, c3 = _high(p1) ^ (c1 ^ k0), _low(p1), _high(p0) ^ (c3 ^ k1), _low(p0)
        k0 += _KEY_STEP_0
        k1 += _KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def group_words(first, position, seed, level: tl.constexpr):
    """Return the words [LANES] of successive groups; `first` is a multiple of `LANES`."""
    # A thread has two successive counters: loads of 16 bytes give it eight successive logits in 16 bits.
    counter = (tl.arange(0, LANES // 8) * 2 + first // 4).to(tl.uint32)
    a0, a1, a2, a3 = philox(counter, position, seed, level)
    b0, b1, b2, b3 = philox(counter + 1, position, seed, level)
    even = tl.join(tl.join(a0, b0), tl.join(a2, b2))
    odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return tl.reshape(tl.join(even, odd), [LANES])


@triton.jit
def noise(token, position, seed):
    """Return the noise of tokens in float64."""
    group = token // (MEMBERS * LANES) * LANES + token % LANES
    member = (token // LANES % MEMBERS).to(tl.uint32)
    first, second = _word(group, position, seed, 0), _word(group, position, seed, 1)
    rest = tl.where(member == second % MEMBERS, 0.0, _exponential(_word(token, position, seed, 2), _DIGIT))
    above = tl.where(member == first % MEMBERS, 0.0, _least(second) + rest)
    return -portable_log(_least(first) + above)


@triton.jit
def _word(index, position, seed, level: tl.constexpr):
    w0, w1, w2, w3 = philox((index // 4).to(tl.uint32), position, seed, level)
    which = index % 4
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def _least(word):
    return _exponential(word >> _MEMBER_BITS, _LEAST_DIGIT) * (1.0 / MEMBERS)


@triton.jit
def _exponential(digits, DIGIT: tl.constexpr):
    return -portable_log((digits.to(tl.float64) + 0.5) * DIGIT)


@triton.jit
def portable_log(x):
    """`noise.portable_log` of positive, normal float64."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52).to(tl.int32) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = mantissa < _HALF_ROOT
    mantissa = tl.where(small, mantissa * 2, mantissa)
    exponent = tl.where(small, exponent - 1, exponent).to(tl.float64)
    s = (mantissa - 1) / (mantissa + 1)
    z = s * s
    series = tl.full(s.shape, 2 / (2 * _TERMS - 1), tl.float64)
    for below in tl.static_range(_TERMS - 1):
        series = series * z + 2 / (2 * (_TERMS - 2 - below) + 1)
    return exponent * _LOG_2 + s * series


@triton.jit
def _low(wide):
    return wide.to(tl.uint32)


@triton.jit
def _high(wide):
    return (wide >> 32).to(tl.uint32)


@triton.jit
def ordered(value):
    """Map a float32 to an int32 in the same order, adjacent floats to adjacent integers; -0.0 is just below 0.0."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """Return the float32 that `ordered` mapped to `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

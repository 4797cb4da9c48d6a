"""Floats as integers that keep their order, for atomics, packing and halving."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(value):
    """The int32 of a float32: greater for a greater one, neighbours for neighbours; -0.0 is just below 0.0."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The float32 of which `ordered` gave the int32 `key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

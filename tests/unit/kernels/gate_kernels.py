"""Kernels that apply a gate's function to each input. Triton reads their source from this file."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.gated_delta.gpu.gates import log2_decay
from baton.kernels.ssd.gpu.time_steps import time_step


@triton.jit
def log2_decays(inputs, outputs, rate, SIZE: tl.constexpr):
    """Write the binary logarithm of the decay of each of SIZE inputs, with this rate and a bias of 0."""
    index = tl.arange(0, SIZE)
    value = tl.load(inputs + index)
    tl.store(outputs + index, log2_decay(value, tl.full([SIZE], 1.0, tl.float32) * rate, tl.zeros([SIZE], tl.float32)))


@triton.jit
def time_step_of_each(inputs, outputs, SIZE: tl.constexpr):
    """Write the time step of each of SIZE outputs of a projection, without limits."""
    index = tl.arange(0, SIZE)
    tl.store(outputs + index, time_step(tl.load(inputs + index), None, 0.0, float("inf")))

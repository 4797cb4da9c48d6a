"""A kernel that applies `log2_decay` to each input. In a module of its own because Triton reads a kernel's source."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.gated_delta.gpu.gates import log2_decay


@triton.jit
def log2_decays(inputs, outputs, rate, SIZE: tl.constexpr):
    """Write the binary logarithm of the decay of each of SIZE inputs, with this rate and a bias of 0."""
    index = tl.arange(0, SIZE)
    value = tl.load(inputs + index)
    tl.store(outputs + index, log2_decay(value, tl.full([SIZE], 1.0, tl.float32) * rate, tl.zeros([SIZE], tl.float32)))

"""Measures the read bandwidth of a GPU: every byte is read once, with many 16-byte loads in flight per thread.

torch's sum reads 15 % slower on an H200 than kernels that stream weights or keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # values of a program: 128 bytes a thread


def read(source: Tensor) -> Tensor:
    """Return the sum of each block of contiguous float32 `source`, whose size is a multiple of BLOCK."""
    sums = torch.empty(source.numel() // BLOCK, dtype=torch.float32, device=source.device)
    sum_block_kernel[(len(sums),)](source, sums, BLOCK=BLOCK, num_warps=8)
    return sums


@triton.jit
def sum_block_kernel(source, sums, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(tl.load(source + place), 0))

"""Copying byte ranges between two addresses each, in Triton: within a device, or to and from memory mapped into it.

`copy_blocks` and its kin name blocks of one tensor. Here each range has its own addresses and length, so one side may
be memory that belongs to another process or another device of the machine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16  # bytes: addresses and lengths are multiples of it
MAX_RANGES = 1 << 16
WORDS = 4096  # of 4 bytes, that one program copies at a time
NUM_WARPS = 8
PROGRAMS = 4 * 132  # a Hopper GPU has 132 multiprocessors; four programs each keep its memory busy


def copy_ranges(ranges: Tensor, num_ranges: int) -> None:
    """Copy `ranges[:num_ranges]`, each (source address, target address, bytes), on the current stream.

    ranges [>= num_ranges, 3] int64, contiguous, in device memory or in pinned memory of the host, which is read
    in place: it stays as it is until the kernel has run. Addresses and lengths are multiples of `ALIGNMENT`.

    Raises `ValueError` for a table of another kind, or with more than `MAX_RANGES` ranges.
    """
    if ranges.dtype != torch.int64 or ranges.dim() != 2 or ranges.shape[1] != 3 or not ranges.is_contiguous():
        raise ValueError(f"ranges is {ranges.dtype} {list(ranges.shape)}: give contiguous int64 [n, 3]")
    if not 0 <= num_ranges <= min(len(ranges), MAX_RANGES):
        raise ValueError(f"{num_ranges} ranges of a table of {len(ranges)}: give at most {MAX_RANGES}")
    if num_ranges == 0:
        return
    programs_per_range = max(1, PROGRAMS // num_ranges)
    _copy_ranges_kernel[(num_ranges, programs_per_range)](ranges, WORDS=WORDS, num_warps=NUM_WARPS)


@triton.jit
def _copy_ranges_kernel(
    ranges,  # int64 [n, 3]: source address, target address, bytes
    WORDS: tl.constexpr,
):
    row = ranges + 3 * tl.program_id(0)
    source = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.int32)), 16)
    num_words = tl.multiple_of(tl.load(row + 2) // 4, 4)
    start = tl.program_id(1).to(tl.int64) * WORDS
    while start < num_words:
        words = start + tl.arange(0, WORDS)
        values = tl.load(source + words, mask=words < num_words)
        tl.store(target + words, values, mask=words < num_words)
        start += tl.num_programs(1) * WORDS

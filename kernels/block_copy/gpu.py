"""Copies of KV blocks in Triton: each program copies 16 KB, of any dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl

WORDS = 4096  # words of 4 bytes that one program copies
NUM_WARPS = 8
ALIGNMENT = 16  # bytes: addresses and lengths of ranges are multiples of it
MAX_RANGES = 1 << 16
SOURCE, TARGET, NUM_BYTES = (tl.constexpr(field) for field in range(3))  # of a range, in words of 8 bytes
FIELDS = tl.constexpr(3)
PROGRAMS = 4 * 132  # a Hopper GPU has 132 multiprocessors; four programs each keep its memory busy


def gather_blocks(kv: Tensor, block_ids: Tensor, staging: Tensor, first_head: int) -> Tensor:
    """See `baton.kernels.block_copy.gather_blocks`. `staging` may be pinned memory of the host."""
    blocks, stage = _words(kv), _words(staging)
    _copy(blocks, block_ids, stage, None, first_head * _head_words(kv), 0, stage.shape[1])
    return staging


def scatter_blocks(staging: Tensor, block_ids: Tensor, kv: Tensor, first_head: int) -> None:
    """See `baton.kernels.block_copy.scatter_blocks`. `staging` may be pinned memory of the host."""
    blocks, stage = _words(kv), _words(staging)
    _copy(stage, None, blocks, block_ids, 0, first_head * _head_words(kv), stage.shape[1])


def copy_blocks(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See `baton.kernels.block_copy.copy_blocks`."""
    blocks = _words(kv)
    _copy(blocks, sources, blocks, targets, 0, 0, blocks.shape[1])


def copy_ranges(ranges: Tensor, num_ranges: int) -> None:
    """Copy `ranges[:num_ranges]`, each (source address, target address, bytes), on the current stream.

    One side may be memory of another process or device that is mapped into this one.

    ranges [>= num_ranges, 3] is int64, contiguous, in device memory or in pinned host memory, which the kernel reads
    directly: it must not change until the kernel has run. Addresses and lengths are multiples of `ALIGNMENT`.

    Raises `ValueError` for a table of another shape or dtype, or with more than `MAX_RANGES` ranges.
    """
    if ranges.dtype != torch.int64 or ranges.dim() != 2 or ranges.shape[1] != 3 or not ranges.is_contiguous():
        raise ValueError(f"ranges is {ranges.dtype} {list(ranges.shape)}: give contiguous int64 [n, 3]")
    if not 0 <= num_ranges <= min(len(ranges), MAX_RANGES):
        raise ValueError(f"{num_ranges} ranges of a table of {len(ranges)}: give at most {MAX_RANGES}")
    if num_ranges == 0:
        return
    programs_per_range = max(1, PROGRAMS // num_ranges)
    _copy_ranges_kernel[(num_ranges, programs_per_range)](ranges, WORDS=WORDS, num_warps=NUM_WARPS)


def _words(blocks: Tensor) -> Tensor:
    """View blocks [n, heads, ...] as rows of int32."""
    return blocks.view(torch.uint8).flatten(1).view(torch.int32)


def _head_words(blocks: Tensor) -> int:
    """Return the number of int32 words of one head of a block. Raises `ValueError` if it is not an integer."""
    num_bytes = blocks.stride(1) * blocks.element_size()
    if num_bytes % 4:
        raise ValueError(f"a head's share of a block has {num_bytes} bytes: give a multiple of 4")
    return num_bytes // 4


def _copy(
    source: Tensor,
    source_ids: Tensor | None,
    target: Tensor,
    target_ids: Tensor | None,
    source_offset: int,
    target_offset: int,
    num_words: int,
) -> None:
    """Copy `num_words` words of each row, from row source_ids[i] to row target_ids[i]; without ids, row i."""
    ids = target_ids if source_ids is None else source_ids
    assert ids is not None, "one side is named by ids"
    if len(ids) == 0:
        return
    copy_kernel[(len(ids) * triton.cdiv(num_words, WORDS),)](
        source,
        source_ids,
        target,
        target_ids,
        source.stride(0),
        target.stride(0),
        source_offset,
        target_offset,
        NUM_WORDS=num_words,
        WORDS=WORDS,
        num_warps=NUM_WARPS,
        **pdl.launch_options(),
    )


@triton.jit
def copy_kernel(
    source,  # int32 rows, source_stride apart
    source_ids,  # [n] int, or None: 0, 1, 2, ...
    target,
    target_ids,
    source_stride,
    target_stride,
    source_offset,  # first word of a row to copy
    target_offset,
    NUM_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    pdl.let_next_start()
    programs_per_row: tl.constexpr = triton.cdiv(NUM_WORDS, WORDS)
    index = tl.program_id(0) // programs_per_row
    words = tl.program_id(0) % programs_per_row * WORDS + tl.arange(0, WORDS)
    pdl.wait_for_previous()
    source_row = (index if source_ids is None else tl.load(source_ids + index)).to(tl.int64)
    target_row = (index if target_ids is None else tl.load(target_ids + index)).to(tl.int64)
    if source_row >= 0 and target_row >= 0:
        values = tl.load(source + source_row * source_stride + source_offset + words, mask=words < NUM_WORDS)
        tl.store(target + target_row * target_stride + target_offset + words, values, mask=words < NUM_WORDS)


@triton.jit
def _copy_ranges_kernel(
    ranges,  # int64 [n, FIELDS]: source address, target address, bytes
    WORDS: tl.constexpr,
):
    row = ranges + FIELDS * tl.program_id(0)
    source = tl.multiple_of(tl.load(row + SOURCE).to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(tl.load(row + TARGET).to(tl.pointer_type(tl.int32)), 16)
    num_words = tl.multiple_of(tl.load(row + NUM_BYTES) // 4, 4)
    start = tl.program_id(1).to(tl.int64) * WORDS
    while start < num_words:
        words = start + tl.arange(0, WORDS)
        values = tl.load(source + words, mask=words < num_words)
        tl.store(target + words, values, mask=words < num_words)
        start += tl.num_programs(1) * WORDS

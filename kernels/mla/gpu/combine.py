"""Merges the parts of results, in a kernel of its own: for results of many parts, or that a library multiplies next."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous
from baton.kernels.split_kv import LOWEST, merge_parts

from .partial_results import PartialResults, part_at, parts_of
from .work_list import WorkList

FEW_ROWS, MANY_ROWS = 256, 4096  # up to so many, a program has a piece of one row, or one row
PIECES = 4
MANY_AT_ONCE = 16  # rows of a program otherwise


def combine(results: PartialResults, batch: AttentionBatch, work: WorkList) -> None:
    """Write the rows of `results.attended` that have several parts, and zeros for tokens of slot -1."""
    num_tokens, num_heads, rank = results.attended.shape
    rows = num_tokens * num_heads
    if rows <= FEW_ROWS:
        block_rows, pieces, at_once = 1, PIECES, 32
    elif rows <= MANY_ROWS:
        block_rows, pieces, at_once = 1, 1, 8
    else:
        block_rows, pieces, at_once = MANY_AT_ONCE, 1, 1
    _combine[(triton.cdiv(rows, block_rows), pieces)](
        results.attended,
        results.lse,
        work.items,
        work.token_items,
        batch.slots,
        rows,
        work.num_programs,
        num_heads,
        ROWS=work.tiles.rows,
        HEADS=work.tiles.heads,
        RANK=rank,
        BLOCK_ROWS=block_rows,
        PIECES=pieces,
        PARTS=at_once,
        num_warps=4 if block_rows == 1 else 8,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _combine(
    results_ptr,
    lse_ptr,
    items_ptr,
    token_items_ptr,
    slots_ptr,
    num_rows,
    num_programs,
    num_heads,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    PARTS: tl.constexpr,
):
    SIZE: tl.constexpr = RANK // PIECES
    let_next_start()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    token, head = row // num_heads, row % num_heads
    exists = row < num_rows
    is_real = exists & (tl.load(slots_ptr + token, mask=exists, other=-1) >= 0)
    num_parts, first_part, second_part = parts_of(
        token, head, is_real, items_ptr, token_items_ptr, num_programs, ROWS, HEADS
    )
    most = tl.max(num_parts, 0)
    wait_for_previous()
    top = tl.full((BLOCK_ROWS,), LOWEST, tl.float32)
    weight = tl.zeros((BLOCK_ROWS,), tl.float32)
    total = tl.zeros((BLOCK_ROWS, SIZE), tl.float32)
    for base in range(0, tl.where(most > 1, most, 0), PARTS):
        index = (base + tl.arange(0, PARTS))[:, None]
        memory_row, lse = part_at(
            index, lse_ptr, num_parts[None, :], row[None, :], num_rows, first_part[None, :], second_part[None, :], ROWS
        )
        has_part = index < num_parts[None, :]
        address = results_ptr + (memory_row * RANK)[:, :, None] + dims[None, None, :]
        part = tl.load(address, mask=has_part[:, :, None], other=0.0).to(tl.float32)
        total, weight, top = merge_parts(total, weight, top, part, has_part.to(tl.float32), lse)
    result = total / tl.where(weight == 0, 1.0, weight)[:, None]
    target = results_ptr + row.to(tl.int64)[:, None] * RANK + dims[None, :]
    tl.store(target, result, mask=(exists & (num_parts != 1))[:, None])

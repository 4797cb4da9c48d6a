"""Merges the parts of results, in a kernel of its own: for results of many parts, or that a library multiplies next."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous
from baton.kernels.split_kv import LOWEST, merge_parts

from .partial_results import PartialResults, part_at, parts_of
from .work_list import WorkList

# (pieces of a row, parts that are loaded at a time) by number of rows; a program has a piece of one row
SIZES = {64: (4, 16), 1024: (2, 8)}
OF_MANY_ROWS = (1, 4)


def combine(results: PartialResults, batch: AttentionBatch, work: WorkList) -> None:
    """Write the rows of `results.attended` that have several parts, and zeros for tokens of slot -1."""
    num_tokens, num_heads, rank = results.attended.shape
    rows = num_tokens * num_heads
    pieces, at_once = next((size for most, size in SIZES.items() if rows <= most), OF_MANY_ROWS)
    _combine[(num_tokens, num_heads, pieces)](
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
        PIECES=pieces,
        PARTS=at_once,
        num_warps=1,  # sums over parts stay in its registers
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
    PIECES: tl.constexpr,
    PARTS: tl.constexpr,
):
    SIZE: tl.constexpr = RANK // PIECES
    let_next_start()
    token, head = tl.program_id(0), tl.program_id(1)
    row = token.to(tl.int64) * num_heads + head
    dims = tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    is_real = tl.load(slots_ptr + token) >= 0
    num_parts, first, second = parts_of(token, head, is_real, items_ptr, token_items_ptr, num_programs, ROWS, HEADS)
    wait_for_previous()
    if num_parts != 1:
        top, weight = tl.full((), LOWEST, tl.float32), tl.full((), 0.0, tl.float32)
        total = tl.zeros((SIZE,), tl.float32)
        for base in range(0, num_parts, PARTS):
            index = base + tl.arange(0, PARTS)
            part_row, lse = part_at(index, lse_ptr, num_parts, row, num_rows, first, second, ROWS)
            exists = index < num_parts
            place = results_ptr + part_row[:, None] * RANK + dims[None, :]
            part = tl.load(place, mask=exists[:, None], other=0.0).to(tl.float32)
            total, weight, top = merge_parts(total, weight, top, part, exists.to(tl.float32), lse)
        tl.store(results_ptr + row * RANK + dims, total / tl.where(weight == 0, 1.0, weight))

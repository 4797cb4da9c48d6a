"""Combines the parts of items that are divided over several programs, in a second kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous
from baton.kernels.split_kv import LOWEST, merge_parts

from .work_list import FIRST_TOKEN, ITEM_WORDS, NUM_QUERIES, WorkList, programs_of

FEW_ROWS = 256  # with fewer rows, a program takes only one, so that the device is filled
MANY_AT_ONCE = 16  # rows of a program otherwise


def combine(
    parts: Tensor, softmax: Tensor, batch: AttentionBatch, work: WorkList, heads: int, *, out: Tensor, pads: bool
) -> None:
    """Write the rows of out [T, H, rank] whose softmax is divided into several parts.

    parts [groups, programs, 2, rows, rank] are unnormalized sums; softmax [..., 2] has the top score (base 2) and the
    sum of weights; each group of `heads` heads has its own. Part 1 belongs to the item that began in the program's
    share, part 0 to the item that began in an earlier one. With `pads`, tokens of slot -1 get zeros.
    """
    groups, _, _, rows, rank = parts.shape
    few = work.max_items * rows * groups <= FEW_ROWS
    block_rows, pieces = (1, 4) if few else (MANY_AT_ONCE, 1)
    _combine[(work.max_items, rows // block_rows, groups * pieces)](
        parts,
        softmax,
        out,
        work.items,
        work.starts,
        batch.slots,
        out.shape[0],
        work.max_items,
        work.num_programs,
        out.shape[1],
        ROWS=rows,
        HEADS=heads,
        RANK=rank,
        BLOCK_ROWS=block_rows,
        PIECES=pieces,
        PARTS=32 if few else 1,
        PADS=pads,
        num_warps=4 if few else 8,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_tokens", "max_items", "num_programs"])
def _combine(
    parts_ptr,
    softmax_ptr,
    out_ptr,
    items_ptr,
    starts_ptr,
    slots_ptr,
    num_tokens,
    max_items,
    num_programs,
    num_heads,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    PARTS: tl.constexpr,
    PADS: tl.constexpr,
):
    SIZE: tl.constexpr = RANK // PIECES
    item, group = tl.program_id(0), tl.program_id(2) // PIECES
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.program_id(2) % PIECES * SIZE + tl.arange(0, SIZE)
    query, head = row // HEADS, group * HEADS + row % HEADS
    wait_for_previous()
    let_next_start()
    if PADS:  # there are items for all tokens, padding included
        token = item * (ROWS // HEADS) + query
        is_token = (token < num_tokens) & (head < num_heads)
        slot = tl.load(slots_ptr + token, mask=is_token, other=0)
        target = (token.to(tl.int64) * num_heads + head) * RANK
        is_padding = (is_token & (slot < 0))[:, None]
        tl.store(out_ptr + target[:, None] + dims[None, :], tl.zeros((BLOCK_ROWS, SIZE), tl.float32), mask=is_padding)

    start = tl.load(starts_ptr + item)
    end = tl.load(starts_ptr + item + 1)
    num_tiles = tl.load(starts_ptr + max_items)
    first_token = tl.load(items_ptr + ITEM_WORDS * item + FIRST_TOKEN)
    num_queries = tl.load(items_ptr + ITEM_WORDS * item + NUM_QUERIES)
    if end > start:
        first, last = programs_of(start, end, num_tiles, num_programs)
        if last > first:
            highest = tl.full((BLOCK_ROWS,), LOWEST, tl.float32)
            weight = tl.zeros((BLOCK_ROWS,), tl.float32)
            total = tl.zeros((BLOCK_ROWS, SIZE), tl.float32)
            for base in range(first, last + 1, PARTS):
                program = base + tl.arange(0, PARTS)
                exists = (program <= last)[:, None]
                begins = (program == first).to(tl.int64)
                part = ((group * num_programs + program) * 2 + begins)[:, None] * ROWS + row[None, :]
                peaks = tl.load(softmax_ptr + 2 * part, mask=exists, other=float("-inf"))
                weights = tl.load(softmax_ptr + 2 * part + 1, mask=exists, other=0.0)
                address = parts_ptr + (part * RANK)[:, :, None] + dims[None, None, :]
                sums = tl.load(address, mask=exists[:, :, None], other=0.0)
                total, weight, highest = merge_parts(total, weight, highest, sums, weights, peaks)
            is_query = ((query < num_queries) & (head < num_heads))[:, None]
            target = ((first_token + query).to(tl.int64) * num_heads + head) * RANK
            tl.store(out_ptr + target[:, None] + dims[None, :], total / weight[:, None], mask=is_query)

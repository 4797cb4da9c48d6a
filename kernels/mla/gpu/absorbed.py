"""Absorbed MLA in Triton: queries are in the space of latents, so that a page is read once, for keys and values.

    scores [rows, tile] = q_latent latents^T + q_rope ropes^T        rows: the heads of a few query tokens
    out    [rows, rank] = softmax(scores) latents

Work is divided as in `work_list`; results are stored as in `partial_results`. At DeepSeek-V2's sizes, a key has 1 152
bytes, and needs 35 kFLOP for 16 heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.split_kv import LOG2_E, LOWEST

from .partial_results import PartialResults, part_row
from .work_list import (
    FIRST_ITEM,
    FIRST_TILE,
    FIRST_TOKEN,
    ITEM_WORDS,
    NUM_QUERIES,
    NUM_VISIBLE,
    SHARE_WORDS,
    TABLE_ROW,
    WorkList,
)

FEW_ROWS = 16  # with so few rows, shared memory has room for one more tile in flight


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    work: WorkList,
    *,
    scale: float,
    results: PartialResults,
) -> None:
    """Write the results of the tokens of `work`, from q_latent [T, H, rank] and q_rope [T, H, rope].

    Both may be strided views whose last dimension is contiguous.
    """
    num_heads, rank = q_latent.shape[1:]
    tiles = work.tiles
    latent_attention_kernel[(work.num_programs, tiles.groups(num_heads))](
        q_latent,
        q_rope,
        kv,
        results.attended,
        results.parts,
        results.lse,
        work.items,
        work.starts,
        work.shares,
        batch.block_tables,
        scale * LOG2_E.value,
        layer * kv.stride(2),
        kv.stride(0),
        batch.block_tables.stride(0),
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        num_heads,
        ROWS=tiles.rows,
        HEADS=tiles.heads,
        RANK=rank,
        ROPE=q_rope.shape[2],
        TILE=tiles.tile,
        PAGE=kv.shape[4],
        num_warps=8,
        num_stages=3 if tiles.rows <= FEW_ROWS else 2,
    )


@triton.jit
def latent_attention_kernel(
    q_latent_ptr,
    q_rope_ptr,
    kv_ptr,
    out_ptr,
    parts_ptr,
    lse_ptr,
    items_ptr,
    starts_ptr,
    shares_ptr,
    tables_ptr,
    scale,
    layer_offset,
    block_stride,
    table_stride,
    latent_token_stride,
    latent_head_stride,
    rope_token_stride,
    rope_head_stride,
    num_heads,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
):
    program, group = tl.program_id(0), tl.program_id(1)
    share = shares_ptr + SHARE_WORDS * program
    tile = tl.load(share + FIRST_TILE)
    item = tl.load(share + FIRST_ITEM)
    share_end = tl.load(share + SHARE_WORDS + FIRST_TILE)
    row = tl.arange(0, ROWS)
    head = (group * HEADS + row % HEADS).to(tl.int64)  # projected queries are stored head by head
    dims, rope_dims = tl.arange(0, RANK), tl.arange(0, ROPE)
    key_in_tile = tl.arange(0, TILE)

    while tile < share_end:
        item_start = tl.load(starts_ptr + item)
        item_end = tl.load(starts_ptr + item + 1)
        end = tl.minimum(item_end, share_end)
        words = items_ptr + ITEM_WORDS * item
        num_queries = tl.load(words + NUM_QUERIES)
        first_visible = tl.load(words + NUM_VISIBLE)
        table = tables_ptr + tl.load(words + TABLE_ROW).to(tl.int64) * table_stride
        num_keys = first_visible + num_queries - 1

        query = row // HEADS
        is_query = (query < num_queries) & (head < num_heads)
        token = (tl.load(words + FIRST_TOKEN) + query).to(tl.int64)
        num_visible = tl.minimum(first_visible + query, num_keys)  # number of keys that each row sees
        latent_row = q_latent_ptr + token * latent_token_stride + head * latent_head_stride
        rope_row = q_rope_ptr + token * rope_token_stride + head * rope_head_stride
        q_latent = tl.load(latent_row[:, None] + dims[None, :], mask=is_query[:, None], other=0.0)
        q_rope = tl.load(rope_row[:, None] + rope_dims[None, :], mask=is_query[:, None], other=0.0)
        total = tl.zeros((ROWS, RANK), tl.float32)
        highest = tl.full((ROWS,), LOWEST, tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)

        following = (tile - item_start) * TILE + key_in_tile
        next_block = tl.load(table + following // PAGE, mask=following < num_keys, other=0)
        for index in tl.range(tile - item_start, end - item_start):
            key = index * TILE + key_in_tile
            exists = key < num_keys
            block = next_block  # block ids are loaded one tile ahead, so that loads of pages can start earlier
            following = key + TILE
            next_block = tl.load(table + following // PAGE, mask=following < num_keys, other=0)
            page_row = kv_ptr + layer_offset + block.to(tl.int64) * block_stride + key % PAGE * (RANK + ROPE)
            latents = tl.load(page_row[:, None] + dims[None, :], mask=exists[:, None], other=0.0)
            ropes = tl.load(page_row[:, None] + RANK + rope_dims[None, :], mask=exists[:, None], other=0.0)
            scores = tl.dot(q_latent, tl.trans(latents), tl.dot(q_rope, tl.trans(ropes))) * scale
            scores = tl.where(key[None, :] < num_visible[:, None], scores, float("-inf"))
            peak = tl.maximum(highest, tl.max(scores, 1))
            decay = tl.exp2(highest - peak)
            probs = tl.exp2(scores - peak[:, None])
            weight = weight * decay + tl.sum(probs, 1)
            total = tl.dot(probs.to(latents.dtype), latents, total * decay[:, None])
            highest = peak

        begins = tile == item_start
        weight = tl.where(weight == 0, 1.0, weight)
        result = total / weight[:, None]
        if begins & (end == item_end):
            rows_out = out_ptr + (token * num_heads + head) * RANK
            tl.store(rows_out[:, None] + dims[None, :], result, mask=is_query[:, None])
        else:
            part = part_row(program, begins.to(tl.int32), group, tl.num_programs(0), row, ROWS)
            tl.store(parts_ptr + part[:, None] * RANK + dims[None, :], result)
            tl.store(lse_ptr + part, highest + tl.log2(weight))
        item += 1
        tile = end

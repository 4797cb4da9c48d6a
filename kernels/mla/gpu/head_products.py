"""Products with the matrices between latents and heads, on either side of absorbed attention.

up to 2 tokens      to values: `head_gemv`, bound by reading the matrices
up to 256           tiles of tokens x columns, one head each; those to values also merge parts of results
more                torch's batched product
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.launch import next_power_of_2
from baton.kernels.pdl import launch_options, let_next_start, prefetch, wait_for_previous
from baton.kernels.split_kv import LOWEST

from ..up_projection import MOST_TILED_TOKENS, UpProjection
from . import head_gemv
from .combine import combine
from .partial_results import PartialResults, part_at, parts_of
from .work_list import WorkList

FEW_PROGRAMS = 3  # with as many programs for an item, or more, a kernel of its own merges parts
VALUE_TILES = {32: (8, 64, 4), 128: (16, 128, 4), 256: (32, 128, 8)}  # tokens, columns, warps, by number of tokens
LEAST_COLUMNS = 16  # that a matrix product needs; of tokens, too, in the product to latents
DEPTH = 128  # dimensions of latents that are multiplied at a time
LINE_BYTES = tl.constexpr(128)


def absorb(up: UpProjection, q: Tensor) -> Tensor:
    """Compute `UpProjection.absorb`."""
    num_tokens, num_heads, depth = q.shape
    if num_tokens > MOST_TILED_TOKENS:
        return up.absorb(q)
    out = torch.empty((num_tokens, num_heads, up.rank), dtype=q.dtype, device=q.device)
    matrices = up.by_head[:, : up.nope_dim]
    tokens = max(LEAST_COLUMNS, min(64, next_power_of_2(num_tokens)))
    columns = min(up.rank, 128)
    _multiply_to_latents[(triton.cdiv(up.rank, columns), num_heads, triton.cdiv(num_tokens, tokens))](
        q,
        matrices,
        out,
        num_tokens,
        q.stride(0),
        q.stride(1),
        matrices.stride(0),
        num_heads,
        DEPTH=depth,
        PADDED_DEPTH=next_power_of_2(depth),
        RANK=up.rank,
        TOKENS=tokens,
        COLUMNS=columns,
        num_warps=4,
        **launch_options(),
    )
    return out


def values(up: UpProjection, results: PartialResults, batch: AttentionBatch, work: WorkList, out: Tensor) -> None:
    """Compute `UpProjection.values` of attention's results, and zeros for tokens of slot -1."""
    num_tokens = out.shape[0]
    has_tiles = head_gemv.MOST_TOKENS < num_tokens <= MOST_TILED_TOKENS
    merges = has_tiles and work.num_programs < FEW_PROGRAMS * work.num_items
    if not merges:
        combine(results, batch, work)
    if has_tiles:
        _values_by_tiles(up, results, batch, work, out, merges=merges)
    elif num_tokens <= head_gemv.MOST_TOKENS:
        head_gemv.multiply_heads(results.attended, up.by_head[:, up.nope_dim :], out)
    else:
        up.values(results.attended, out)


def _values_by_tiles(
    up: UpProjection, results: PartialResults, batch: AttentionBatch, work: WorkList, out: Tensor, *, merges: bool
) -> None:
    num_tokens, num_heads, width = out.shape
    tokens, columns, num_warps = next(tile for most, tile in VALUE_TILES.items() if num_tokens <= most)
    columns = min(columns, max(LEAST_COLUMNS, next_power_of_2(width)))
    matrices = up.by_head[:, up.nope_dim :]
    _multiply_to_values[(triton.cdiv(width, columns), num_heads, triton.cdiv(num_tokens, tokens))](
        results.attended,
        results.lse,
        matrices,
        out,
        work.items,
        work.token_items,
        batch.slots,
        num_tokens,
        work.num_programs,
        work.num_programs if merges else 1,
        num_heads,
        matrices.stride(0),
        out.stride(0),
        out.stride(1),
        ROWS=work.tiles.rows,
        HEADS=work.tiles.heads,
        RANK=up.rank,
        VALUE_DIM=width,
        TOKENS=tokens,
        COLUMNS=columns,
        DEPTH=min(DEPTH, up.rank),
        num_warps=num_warps,
        num_stages=3,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_to_latents(
    q_ptr,
    matrices_ptr,
    out_ptr,
    num_tokens,
    q_token_stride,
    q_head_stride,
    head_stride,
    num_heads,
    DEPTH: tl.constexpr,
    PADDED_DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute out [T, H, RANK] = q [T, H, DEPTH] matrices [H, DEPTH, RANK], one tile of a head per program."""
    let_next_start()
    head = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, PADDED_DEPTH)
    exists = (token < num_tokens)[:, None]
    place = head.to(tl.int64) * head_stride + depth[:, None] * RANK + column[None, :]
    matrix = tl.load(matrices_ptr + place, mask=(depth < DEPTH)[:, None], other=0.0)
    wait_for_previous()
    row = token.to(tl.int64) * q_token_stride + head * q_head_stride
    x = tl.load(q_ptr + row[:, None] + depth[None, :], mask=exists & (depth < DEPTH)[None, :], other=0.0)
    out_row = token.to(tl.int64) * num_heads + head
    tl.store(out_ptr + out_row[:, None] * RANK + column[None, :], tl.dot(x, matrix), mask=exists)


@triton.jit(do_not_specialize=["num_tokens", "num_programs", "most_parts"])
def _multiply_to_values(
    results_ptr,
    lse_ptr,
    matrices_ptr,
    out_ptr,
    items_ptr,
    token_items_ptr,
    slots_ptr,
    num_tokens,
    num_programs,
    most_parts,
    num_heads,
    head_stride,
    out_token_stride,
    out_head_stride,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute out [T, H, VALUE_DIM] = merged results [T, H, RANK] matrices [H, VALUE_DIM, RANK]^T.

    Columns are the rows of the product, so that a tile may have few tokens. With `most_parts` 1, another kernel has
    merged the parts.
    """
    let_next_start()
    head = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    exists = token < num_tokens
    has_column = (column < VALUE_DIM)[:, None]
    matrix_rows = matrices_ptr + head.to(tl.int64) * head_stride + column[:, None] * RANK
    LINE: tl.constexpr = min(LINE_BYTES * 8 // matrices_ptr.dtype.element_ty.primitive_bitwidth, RANK)
    prefetch(tl.where(has_column, matrix_rows, matrices_ptr) + tl.arange(0, RANK // LINE)[None, :] * LINE)
    is_real = exists & (tl.load(slots_ptr + token, mask=exists, other=-1) >= 0)
    num_parts, first, second = parts_of(token, head, is_real, items_ptr, token_items_ptr, num_programs, ROWS, HEADS)
    num_parts = tl.minimum(num_parts, most_parts)
    most = tl.max(num_parts, 0)
    whole, num_whole = token.to(tl.int64) * num_heads + head, num_tokens.to(tl.int64) * num_heads
    wait_for_previous()
    top = tl.full((TOKENS,), LOWEST, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    acc = tl.zeros((COLUMNS, TOKENS), tl.float32)
    for index in range(0, most, 2):  # two parts at a time: few results have more
        row_0, lse_0 = part_at(index, lse_ptr, num_parts, whole, num_whole, first, second, ROWS)
        row_1, lse_1 = part_at(index + 1, lse_ptr, num_parts, whole, num_whole, first, second, ROWS)
        new_top = tl.maximum(top, tl.maximum(lse_0, lse_1))
        weight_0, weight_1, shrink = tl.exp2(lse_0 - new_top), tl.exp2(lse_1 - new_top), tl.exp2(top - new_top)
        total = total * shrink + weight_0 + weight_1
        acc *= shrink[None, :]
        top = new_top
        has_0, has_1 = (index < num_parts)[:, None], (index + 1 < num_parts)[:, None]
        for begin in range(0, RANK, DEPTH):
            dims = begin + depth[None, :]
            part_0 = tl.load(results_ptr + row_0[:, None] * RANK + dims, mask=has_0, other=0.0)
            part_1 = tl.load(results_ptr + row_1[:, None] * RANK + dims, mask=has_1, other=0.0)
            matrix = tl.load(matrix_rows + dims, mask=has_column, other=0.0)
            merged = part_0.to(tl.float32) * weight_0[:, None] + part_1.to(tl.float32) * weight_1[:, None]
            acc = tl.dot(matrix, tl.trans(merged.to(matrix.dtype)), acc)
    acc /= tl.where(total == 0, 1.0, total)[None, :]
    place = out_ptr + token.to(tl.int64)[:, None] * out_token_stride + head * out_head_stride + column[None, :]
    tl.store(place, tl.trans(acc), mask=exists[:, None] & (column < VALUE_DIM)[None, :])

"""Grouped GEMM: the two products of all experts over tiles of rows (see `alignment`), and the sum over each token's
experts.

    gate_up   rows of x, gathered  x  [2 F, H] of the tile's expert  ->  activation        [rows, F]
    down      those rows           x  [H, F]   of the tile's expert  ->  * routing weight  [pairs, H], scattered

Programs of one tile are neighbours, and so are the tiles of one expert: an expert's weights are read from memory once,
and then from L2. The grid has room for the worst routing; programs without a tile exit at once. Contiguous operands are
loaded by TMA (descriptors), which pads with zeros past the end of a row. Blocks that extend past an expert's last
column or row compute some of the next expert's, but do not store them.

A kernel contains its product twice, for whole tiles and for tiles with few rows: only the device knows how many rows an
expert has, and padding a few rows to a whole tile would make tensor cores the bottleneck instead of memory.

8-bit weights are dequantized in registers, from which tensor cores can read the left operand. So the product is weight
times rows, and a tile may have as few rows as the short side of a tensor-core tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.kernels.launch import cdiv, next_power_of_2
from baton.kernels.moe.experts import ExpertWeights
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous

from .alignment import RowTiles
from .elementwise import activated_columns, activation_constants, dequantized, down_scales, gate_up_scales
from .options import ProductOptions

# A thread of `combine_kernel` sums 8 columns of all of a token's rows, with one 16-byte load in flight per expert.
COMBINE_WARPS = 4
COMBINE_BLOCK = COMBINE_WARPS * 32 * 8


def gate_up(
    x: Tensor, experts: ExpertWeights, tiles: RowTiles, short_rows: int, top_k: int, options: ProductOptions
) -> Tensor:
    """Multiply the rows of `tiles.order` by their experts' `gate_up`, and apply the activation: x [T, H] ->
    [T * K, F].
    """
    weight = experts.gate_up
    _, num_columns, depth = weight.shape
    out = torch.empty((tiles.order.shape[0], num_columns // experts.parts), dtype=x.dtype, device=x.device)
    meta = options.meta(x.itemsize)
    gate_up_kernel[(tiles.most * cdiv(num_columns, options.block_columns),)](
        x,
        _blocks(weight.view(-1, depth), meta["BLOCK_COLUMNS"], meta["BLOCK_DEPTH"]),
        experts.gate_up_scale,
        experts.gate_up_bias,
        out,
        tiles.order,
        tiles.table,
        tiles.count,
        x.stride(0),
        COLUMNS=num_columns,
        DEPTH=depth,
        TOP_K=top_k,
        BLOCK_ROWS=tiles.block_rows,
        SHORT_ROWS=short_rows,
        **activation_constants(experts.activation),
        **meta,
        **launch_options(),
    )
    return out


def down(
    rows: Tensor,
    experts: ExpertWeights,
    tiles: RowTiles,
    short_rows: int,
    routing_weights: Tensor,
    options: ProductOptions,
) -> Tensor:
    """Multiply rows [T * K, F], in the order of the tiles, by `down` and routing weights: [T * K, H], ordered by pair.

    Rows of pairs without an expert are not written.
    """
    weight = experts.down
    _, num_columns, depth = weight.shape
    out = torch.empty((rows.shape[0], num_columns), dtype=rows.dtype, device=rows.device)
    meta = options.meta(rows.itemsize)
    down_kernel[(tiles.most * cdiv(num_columns, options.block_columns),)](
        _blocks(rows, tiles.block_rows, meta["BLOCK_DEPTH"]),
        _blocks(rows, short_rows, meta["BLOCK_DEPTH"]),
        _blocks(weight.view(-1, depth), meta["BLOCK_COLUMNS"], meta["BLOCK_DEPTH"]),
        experts.down_scale,
        experts.down_bias,
        out,
        routing_weights,
        tiles.order,
        tiles.table,
        tiles.count,
        COLUMNS=num_columns,
        DEPTH=depth,
        BLOCK_ROWS=tiles.block_rows,
        SHORT_ROWS=short_rows,
        **meta,
        **launch_options(),
    )
    return out


def combine(outputs: Tensor, expert_ids: Tensor, add_to: Tensor | None) -> Tensor:
    """Sum weighted outputs [T * K, H] over each token's experts -> [T, H], added to `add_to` if given; -1: no expert.

    The result is deterministic: sums have a fixed order, without atomics.
    """
    num_tokens, top_k = expert_ids.shape
    size = outputs.shape[1]
    out = torch.empty((num_tokens, size), dtype=outputs.dtype, device=outputs.device) if add_to is None else add_to
    combine_kernel[(num_tokens, cdiv(size, COMBINE_BLOCK))](
        outputs,
        expert_ids,
        out,
        out.stride(0),
        SIZE=size,
        TOP_K=top_k,
        PLACES=next_power_of_2(top_k),
        BLOCK=COMBINE_BLOCK,
        ADD=add_to is not None,
        num_warps=COMBINE_WARPS,
        **launch_options(),
    )
    return out


def _blocks(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit
def gate_up_kernel(
    x,  # [T, DEPTH]
    weight,  # blocks of [E * COLUMNS, DEPTH]
    scale,  # [E, 2 * blocks of COLUMNS / 2, blocks of DEPTH], without gates as many as `down`'s, or None
    bias,  # [E, COLUMNS] or None
    out,  # [T * K, COLUMNS / 2], without gates [T * K, COLUMNS]
    order,
    table,
    count,
    x_stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    UNGATED: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
):
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    tile = tl.program_id(0) // COLUMN_BLOCKS
    column_block = tl.program_id(0) % COLUMN_BLOCKS
    let_next_start()
    wait_for_previous()
    if tile < tl.load(count):
        expert, first_row, end_row = _entry_of(table, tile)
        given = (x, weight, scale, bias, out, order, x_stride, expert, first_row, end_row, column_block)
        if SHORT_ROWS < BLOCK_ROWS and end_row - first_row <= SHORT_ROWS:
            _gate_up_tile(
                *given,
                COLUMNS,
                DEPTH,
                TOP_K,
                SHORT_ROWS,
                BLOCK_COLUMNS,
                BLOCK_DEPTH,
                UNGATED,
                GATE,
                SLOPE,
                LIMIT,
                SHIFT,
            )
        else:
            _gate_up_tile(
                *given,
                COLUMNS,
                DEPTH,
                TOP_K,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
                BLOCK_DEPTH,
                UNGATED,
                GATE,
                SLOPE,
                LIMIT,
                SHIFT,
            )


@triton.jit
def _gate_up_tile(
    x,
    weight,
    scale,
    bias,
    out,
    order,
    x_stride,
    expert,
    first_row,
    end_row,
    column_block,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    UNGATED: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Compute a block of columns of up to ROWS rows of one expert, from `first_row` to `end_row`."""
    row = first_row + tl.arange(0, ROWS)
    here = row < end_row
    pair = tl.load(order + row, mask=here, other=0)
    k = tl.arange(0, BLOCK_DEPTH)
    x_at = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
    first_column = expert * COLUMNS + column_block * BLOCK_COLUMNS
    NARROW: tl.constexpr = scale is not None
    if NARROW:
        last = tl.minimum(column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS), COLUMNS - 1)
        scale_rows = gate_up_scales(scale, expert, last, COLUMNS, DEPTH, UNGATED)
    sums = tl.zeros([BLOCK_COLUMNS, ROWS] if NARROW else [ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        if DEPTH % BLOCK_DEPTH == 0:
            x_block = tl.load(x_at + start)
        else:
            x_block = tl.load(x_at + start, mask=(k < DEPTH - start)[None, :], other=0.0)
        weight_block = weight.load([first_column, start])
        if NARROW:
            wide = dequantized(weight_block, scale_rows, start, x_block.dtype)
            sums = tl.dot(wide, x_block.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(x_block, weight_block.T, sums, input_precision="ieee")
    products = sums.T if NARROW else sums
    if bias is not None:
        products += _bias_of(bias, expert, column_block, COLUMNS, BLOCK_COLUMNS)
    PARTS: tl.constexpr = 2 if UNGATED is None else 1
    activation = activated_columns(products, ROWS, BLOCK_COLUMNS, UNGATED, GATE, SLOPE, LIMIT, SHIFT)
    column = column_block * (BLOCK_COLUMNS // PARTS) + tl.arange(0, BLOCK_COLUMNS // PARTS)
    to = out + row.to(tl.int64)[:, None] * (COLUMNS // PARTS) + column[None, :]
    tl.store(to, activation.to(out.dtype.element_ty), mask=here[:, None] & (column < COLUMNS // PARTS)[None, :])


@triton.jit
def down_kernel(
    rows,  # blocks of BLOCK_ROWS of [T * K, DEPTH]
    few_rows,  # blocks of SHORT_ROWS of them
    weight,  # blocks of [E * COLUMNS, DEPTH]
    scale,  # [E, blocks of COLUMNS, blocks of DEPTH] or None
    bias,  # [E, COLUMNS] or None
    out,  # [T * K, COLUMNS]
    routing_weights,  # [T * K] float32
    order,
    table,
    count,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    COLUMN_BLOCKS: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    tile = tl.program_id(0) // COLUMN_BLOCKS
    column_block = tl.program_id(0) % COLUMN_BLOCKS
    let_next_start()
    wait_for_previous()
    if tile < tl.load(count):
        expert, first_row, end_row = _entry_of(table, tile)
        given = (weight, scale, bias, out, routing_weights, order, expert, first_row, end_row, column_block)
        if SHORT_ROWS < BLOCK_ROWS and end_row - first_row <= SHORT_ROWS:
            _down_tile(few_rows, *given, COLUMNS, DEPTH, SHORT_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH)
        else:
            _down_tile(rows, *given, COLUMNS, DEPTH, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH)


@triton.jit
def _down_tile(
    rows,  # blocks of ROWS of [T * K, DEPTH]
    weight,
    scale,
    bias,
    out,
    routing_weights,
    order,
    expert,
    first_row,
    end_row,
    column_block,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Compute a block of columns of up to ROWS rows of one expert: see `_gate_up_tile`."""
    first_column = expert * COLUMNS + column_block * BLOCK_COLUMNS
    NARROW: tl.constexpr = scale is not None
    if NARROW:
        last = tl.minimum(column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS), COLUMNS - 1)
        scale_rows = down_scales(scale, expert, last, COLUMNS, DEPTH)
    sums = tl.zeros([BLOCK_COLUMNS, ROWS] if NARROW else [ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        row_block = rows.load([first_row, start])
        weight_block = weight.load([first_column, start])
        if NARROW:
            wide = dequantized(weight_block, scale_rows, start, row_block.dtype)
            sums = tl.dot(wide, row_block.T, sums, input_precision="ieee")
        else:
            sums = tl.dot(row_block, weight_block.T, sums, input_precision="ieee")
    products = sums.T if NARROW else sums
    if bias is not None:
        products += _bias_of(bias, expert, column_block, COLUMNS, BLOCK_COLUMNS)
    row = first_row + tl.arange(0, ROWS)
    here = row < end_row
    pair = tl.load(order + row, mask=here, other=0)
    products *= tl.load(routing_weights + pair, mask=here, other=0.0)[:, None]
    column = column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    to = out + pair.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(to, products.to(out.dtype.element_ty), mask=here[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def _bias_of(bias, expert, column_block, COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the bias [1, BLOCK_COLUMNS] float32."""
    column = column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return tl.load(bias + expert * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _entry_of(table, tile):
    """Return the expert of a tile, its first row, and the end of the expert's rows."""
    entry = table + tile * 3
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def combine_kernel(
    outputs,  # [T * TOP_K, SIZE]
    expert_ids,  # [T, TOP_K]
    out,  # [T, SIZE], rows out_stride apart
    out_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,  # TOP_K, rounded up to a power of two
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    inside = column < SIZE
    wait_for_previous()
    pair = token * TOP_K + place
    routed = tl.load(expert_ids + pair, mask=place < TOP_K, other=-1) >= 0
    output = outputs + pair[:, None] * SIZE + column[None, :]
    total = tl.sum(tl.load(output, mask=routed[:, None] & inside[None, :], other=0.0).to(tl.float32), 0)
    to = out + token * out_stride + column
    if ADD:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)

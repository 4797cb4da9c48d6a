"""Prefill attention for Hopper, which copies pages from the cache to shared memory by TMA: see `hopper.flash`.

In each slab, a page of one head is one TMA box. Several boxes form a tile of keys or values.

    16-bit cache   producer ──keys, values──> consumers
    E4M3 cache     producer ──`stored`──> converters, 4 warps ──keys, values──> consumers

The tensor cores multiply 16 bits in both cases, since they accumulate 8-bit products in only about 14 bits. Converters
write each tile of an E4M3 cache as a tile of the queries' type, which represents all of its values, so the consumers
compute the same as over a 16-bit cache. The scales of keys and values are factors of scores and results.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.hopper.flash import (
    QUERY_BOX,
    ROWS,
    FlashOutput,
    FlashScoring,
    FlashShape,
    TileQueue,
    consume,
    key_tiles,
    new_pipe,
    read_tile_info,
    send_end,
    send_queries,
)
from baton.kernels.hopper.rings import (
    BOX,
    IN_16_BITS,
    SLAB,
    Value,
    async_load,
    barrier,
    cache_fits_boxes,
    new_ring,
    record,
    view,
)
from baton.kernels.launch import multiprocessors
from baton.kernels.query_tiles import FIRST_POSITION, LONG_ROWS, NUM_TOKENS, TABLE_ROW, PrefillPlan

from ..rule import AttentionRule
from .prefill_tiles import as_operand, units_of_stored

KEYS_OF_A_TILE = {64: 128, 128: 128, 256: 64}  # by head dimension: what fits in registers and shared memory
STORED_TILES = {64: 4, 128: 3, 256: 2}  # tiles of keys and values of an E4M3 cache in shared memory
BOXES_OF_8_BITS = {dim: gl.NVMMASharedLayout(min(dim, 128), 8, 2) for dim in KEYS_OF_A_TILE}


def fits(q: Tensor, kv: Tensor, plan: PrefillPlan, rule: AttentionRule) -> bool:
    """Return whether these kernels support the operands: long tiles, their types, pages that fit TMA.

    The cache has the type of the queries, which is 16 bits wide, and no scales; or it is E4M3.
    """
    is_16_bits = q.dtype == kv.dtype and not rule.is_scaled
    return (
        plan.rows == LONG_ROWS
        and q.dtype in IN_16_BITS
        and (is_16_bits or kv.dtype == torch.float8_e4m3fn)
        and q.shape[2] in KEYS_OF_A_TILE
        and kv.shape[5] == q.shape[2]
        and cache_fits_boxes(kv, (*IN_16_BITS, torch.float8_e4m3fn))
        and q.stride(2) == 1
        and q.stride(0) % 8 == q.stride(1) % 8 == q.data_ptr() % 16 == 0
    )


def prefill_pages(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: PrefillPlan,
    rule: AttentionRule,
    *,
    out: Tensor,
) -> None:
    """See `gpu.paged_prefill`. Supports only operands that `fits` accepts."""
    num_heads, dim = q.shape[1:]
    _, num_kv_heads, num_layers, _, block_size, _ = kv.shape
    query_box = [ROWS.value // plan.pack, plan.pack, SLAB.value]
    box = BOX.value if kv.itemsize == 2 else BOXES_OF_8_BITS[dim]
    attend_pages[(min(multiprocessors(q.device), plan.num_items * (num_heads // plan.pack)),)](
        TensorDescriptor.from_tensor(q, query_box, QUERY_BOX.value),
        TensorDescriptor.from_tensor(kv.view(-1, dim), [block_size, box.swizzle_byte_width // kv.itemsize], box),
        out,
        *(rule.sinks, rule.k_scale, rule.v_scale),
        plan.items,
        plan.num_tiles,
        plan.queue,
        batch.block_tables,
        layer,
        *(rule.limit, rule.score_unit, rule.cap_scale),
        *(out.stride(0), out.stride(1), batch.block_tables.stride(0)),
        *(num_heads, num_kv_heads, num_layers),
        PACK=plan.pack,
        KEYS=KEYS_OF_A_TILE[dim],
        DIM=dim,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=rule.has_window,
        HAS_CAP=rule.has_cap,
        STORED_TILES=STORED_TILES[dim],
        num_warps=4,
    )


@record
class PagedCache:
    """One layer of the cache, and the sequences' block tables."""

    pages: Value  # TMA descriptor with boxes [block, slab] of kv, viewed as rows of one head's dimensions
    block_tables: gl.tensor
    table_stride: Value
    num_heads: Value
    num_kv_heads: Value
    num_layers: Value
    layer: gl.tensor


@gluon.jit
def _produce(pipe, stored, tiles, cache, queries, scoring, shape):
    block_rows = cache.num_kv_heads * cache.num_layers * (2 * shape.BLOCK_SIZE)
    turn = 0
    n = 0
    unit = gl.program_id(0)
    while unit < tiles.num_units:
        item = tiles.item(unit)
        first_head = unit // tiles.num_tiles * shape.PACK
        send_queries(pipe, turn, queries, item, first_head, shape)
        turn += 1
        count, first_position = gl.load(item + NUM_TOKENS), gl.load(item + FIRST_POSITION)
        table = cache.block_tables + gl.load(item + TABLE_ROW).to(gl.int64) * cache.table_stride
        num_pages = gl.cdiv(first_position + count, shape.BLOCK_SIZE)
        num_hidden = 0
        if shape.HAS_WINDOW:
            num_hidden = gl.maximum(first_position + 1 - scoring.window, 0) // shape.BLOCK_SIZE
        head = first_head * cache.num_kv_heads // cache.num_heads
        row = (head * cache.num_layers + cache.layer) * (2 * shape.BLOCK_SIZE)
        value_row = row + shape.BLOCK_SIZE
        first, last = key_tiles(first_position, count, scoring, shape)
        for back in range(last - first + 1):
            page = (last - back) * (shape.KEYS // shape.BLOCK_SIZE)
            if stored is None:
                _load_pages(pipe.keys, n, cache.pages, table, page, num_hidden, num_pages, block_rows, row, shape)
                _load_pages(
                    pipe.values, n, cache.pages, table, page, num_hidden, num_pages, block_rows, value_row, shape
                )
            else:
                _load_pages(stored, 2 * n, cache.pages, table, page, num_hidden, num_pages, block_rows, row, shape)
                _load_pages(
                    stored, 2 * n + 1, cache.pages, table, page, num_hidden, num_pages, block_rows, value_row, shape
                )
            n += 1
        unit = tiles.next_unit()
    send_end(pipe, turn, tiles.queue)


@gluon.jit
def _load_pages(ring, n, pages, table, first_page, num_hidden, num_pages, block_rows, row, shape):
    """Start the copies of tile n. Pages outside of num_hidden:num_pages become rows past the end: TMA loads zeros.

    Those are the pages after the sequence's last, and those behind the window, which may be other requests' by now.
    """
    PAGES: gl.constexpr = shape.KEYS // shape.BLOCK_SIZE
    SLABS: gl.constexpr = ring.slabs.shape[0] // ring.full.shape[0]
    COLUMNS: gl.constexpr = ring.slabs.shape[2]
    LAYOUT: gl.constexpr = ring.slabs.layout
    ring.await_free(n)
    ring.expect(n)
    for i in gl.static_range(PAGES):
        exists = (first_page + i >= num_hidden) & (first_page + i < num_pages)
        block = gl.load(table + first_page + i, mask=exists, other=0)
        place = gl.where(exists, block * block_rows + row, pages.shape[0])
        for slab in gl.static_range(SLABS):
            box = view(ring.slab(n, slab), [PAGES, shape.BLOCK_SIZE, COLUMNS], LAYOUT).index(i)
            async_load(pages, [place, slab * COLUMNS], ring.barrier(n), box)


@gluon.jit
def _convert(pipe, stored, scoring, WARPS: gl.constexpr, shape):
    """Convert the tiles of an E4M3 cache to the type of the queries, between the producer and the consumers."""
    turn = 0
    n = 0
    _, count, first_position, _ = read_tile_info(pipe, turn, WARPS)
    while count > 0:
        first, last = key_tiles(first_position, count, scoring, shape)
        for _ in range(last - first + 1):
            _convert_tile(stored, 2 * n, pipe.keys, n, WARPS)
            _convert_tile(stored, 2 * n + 1, pipe.values, n, WARPS)
            n += 1
        turn += 1
        _, count, first_position, _ = read_tile_info(pipe, turn, WARPS)


@gluon.jit
def _convert_tile(stored, index, ring, n, WARPS: gl.constexpr):
    """Write tile `index` of the ring of stored values to tile n of a ring of 16-bit values."""
    STAGES: gl.constexpr = ring.full.shape[0]
    SLABS: gl.constexpr = stored.slabs.shape[0] // stored.full.shape[0]
    ROWS_OF_SLAB: gl.constexpr = stored.slabs.shape[1]
    COLUMNS: gl.constexpr = stored.slabs.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [WARPS, 1], [1, 0])
    stored.await_full(index)
    for slab in gl.static_range(SLABS):
        values = stored.slab(index, slab).load(LAYOUT)
        if slab == 0:
            ring.await_free(n)
        target = view(ring.slabs, [STAGES * SLABS, ROWS_OF_SLAB, COLUMNS], BOX).index(n % STAGES * SLABS + slab)
        target.store(as_operand(values, ring.slabs.dtype))
    hopper.fence_async_shared()
    barrier()  # all warps have read and written
    stored.release(index)
    mbarrier.arrive(ring.barrier(n))


@gluon.jit(do_not_specialize=["layer", "window"])
def attend_pages(
    queries,
    pages,
    out,
    sinks,
    k_scale,
    v_scale,
    items,
    tile_count,
    queue,
    block_tables,
    layer,
    window,
    score_unit,
    cap_scale,
    token_stride,
    head_stride,
    table_stride,
    num_heads,
    num_kv_heads,
    num_layers,
    PACK: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    STORED_TILES: gl.constexpr,
):
    """Compute the tiles of `items` for all heads. Heads that read the same KV head run together, to share it in L2.

    `queries` has boxes [tokens, heads, slab] of q; `pages` has boxes [block, slab] of kv, viewed as rows of one head's
    dimensions.
    """
    IN_8_BITS: gl.constexpr = pages.dtype != queries.dtype
    shape = FlashShape(PACK, KEYS, DIM, DIM, BLOCK_SIZE, HAS_WINDOW, HAS_CAP, IN_8_BITS and DIM > 128)
    pipe = new_pipe(queries.dtype, shape)
    num_tiles = gl.load(tile_count)
    tiles = TileQueue(items, num_tiles, num_tiles * (num_heads // PACK), queue)
    cache = PagedCache(pages, block_tables, table_stride, num_heads, num_kv_heads, num_layers, layer)
    output = FlashOutput(out, token_stride, head_stride, v_scale)
    if not IN_8_BITS:
        scoring = FlashScoring(window, score_unit, cap_scale)
        gl.warp_specialize(
            [
                (consume, (pipe, output, sinks, scoring, 0, shape)),
                (consume, (pipe, output, sinks, scoring, 1, shape)),
                (_produce, (pipe, None, tiles, cache, queries, scoring, shape)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        score_unit, cap_scale = units_of_stored(score_unit, cap_scale, k_scale, HAS_CAP)
        scoring = FlashScoring(window, score_unit, cap_scale)
        BOX_8: gl.constexpr = pages.layout
        # a product of 256 columns needs more registers than a program of 16 warps has at its start
        CONVERTERS: gl.constexpr = 4 if DIM <= 128 else 2
        CONSUMER_REGISTERS: gl.constexpr = 216 if DIM <= 128 else 224
        PRODUCER_REGISTERS: gl.constexpr = 24 if DIM <= 128 else 56
        stored = new_ring(pages.dtype, STORED_TILES, KEYS, DIM, 1, BOX_8)
        hopper.fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (pipe, output, sinks, scoring, 0, shape)),
                (consume, (pipe, output, sinks, scoring, 1, shape)),
                (_convert, (pipe, stored, scoring, CONVERTERS, shape)),
                (_produce, (pipe, stored, tiles, cache, queries, scoring, shape)),
            ],
            [4, CONVERTERS, 1],
            [CONSUMER_REGISTERS, 56, PRODUCER_REGISTERS],
        )

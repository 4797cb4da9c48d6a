"""Prefill attention for Hopper, which copies pages from the cache to shared memory by TMA: see `hopper.flash`.

In each slab, a page of one head is one TMA box. Several boxes form a tile of keys or values.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
    send_end,
    send_queries,
)
from baton.kernels.hopper.rings import BOX, SLAB, Value, async_load, cache_fits_boxes, record, view
from baton.kernels.launch import multiprocessors
from baton.kernels.query_tiles import FIRST_POSITION, LONG_ROWS, NUM_TOKENS, TABLE_ROW, PrefillPlan

from ..rule import AttentionRule

KEYS_OF_A_TILE = {64: 128, 128: 128, 256: 64}  # by head dimension: what fits in registers and shared memory


def fits(q: Tensor, kv: Tensor, plan: PrefillPlan, rule: AttentionRule) -> bool:
    """Return whether this kernel supports the operands: long tiles, 16-bit types, no scales, pages that fit TMA."""
    return (
        plan.rows == LONG_ROWS
        and q.dtype == kv.dtype
        and not rule.is_scaled
        and q.shape[2] in KEYS_OF_A_TILE
        and kv.shape[5] == q.shape[2]
        and cache_fits_boxes(kv)
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
    attend_pages[(min(multiprocessors(q.device), plan.num_items * (num_heads // plan.pack)),)](
        TensorDescriptor.from_tensor(q, query_box, QUERY_BOX.value),
        TensorDescriptor.from_tensor(kv.view(-1, dim), [block_size, SLAB.value], BOX.value),
        out,
        rule.sinks,
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
def _produce(pipe, tiles, cache, queries, scoring, shape):
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
        head = first_head * cache.num_kv_heads // cache.num_heads
        row = (head * cache.num_layers + cache.layer) * (2 * shape.BLOCK_SIZE)
        first, last = key_tiles(first_position, count, scoring, shape)
        for back in range(last - first + 1):
            page = (last - back) * (shape.KEYS // shape.BLOCK_SIZE)
            _load_pages(pipe.keys, n, cache.pages, table, page, num_pages, block_rows, row, shape)
            _load_pages(pipe.values, n, cache.pages, table, page, num_pages, block_rows, row + shape.BLOCK_SIZE, shape)
            n += 1
        unit = tiles.next_unit()
    send_end(pipe, turn, tiles.queue)


@gluon.jit
def _load_pages(ring, n, pages, table, first_page, num_pages, block_rows, row, shape):
    """Start the copies of tile n. Pages after the sequence's last become rows past the end: TMA loads zeros."""
    PAGES: gl.constexpr = shape.KEYS // shape.BLOCK_SIZE
    ring.await_free(n)
    ring.expect(n)
    for i in gl.static_range(PAGES):
        exists = first_page + i < num_pages
        block = gl.load(table + first_page + i, mask=exists, other=0)
        place = gl.where(exists, block * block_rows + row, pages.shape[0])
        for slab in gl.static_range(shape.VALUE_SLABS):
            box = view(ring.slab(n, slab), [PAGES, shape.BLOCK_SIZE, SLAB], BOX).index(i)
            async_load(pages, [place, slab * SLAB], ring.barrier(n), box)


@gluon.jit(do_not_specialize=["layer", "window"])
def attend_pages(
    queries,
    pages,
    out,
    sinks,
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
):
    """Compute the tiles of `items` for all heads. Heads that read the same KV head run together, to share it in L2.

    `queries` has boxes [tokens, heads, slab] of q; `pages` has boxes [block, slab] of kv, viewed as rows of one head's
    dimensions.
    """
    shape = FlashShape(PACK, KEYS, DIM, DIM, BLOCK_SIZE, HAS_WINDOW, HAS_CAP)
    scoring = FlashScoring(window, score_unit, cap_scale)
    pipe = new_pipe(pages.dtype, shape)
    output = FlashOutput(out, token_stride, head_stride)
    num_tiles = gl.load(tile_count)
    tiles = TileQueue(items, num_tiles, num_tiles * (num_heads // PACK), queue)
    cache = PagedCache(pages, block_tables, table_stride, num_heads, num_kv_heads, num_layers, layer)
    gl.warp_specialize(
        [
            (consume, (pipe, output, sinks, scoring, 0, shape)),
            (consume, (pipe, output, sinks, scoring, 1, shape)),
            (_produce, (pipe, tiles, cache, queries, scoring, shape)),
        ],
        [4, 1],
        [240, 24],
    )

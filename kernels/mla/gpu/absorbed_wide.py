"""Absorbed MLA for Hopper with 64 rows, heads of several queries: two warp groups take turns with the tiles.

    scores [rows, tile] = q_latent latents^T + q_rope ropes^T      of even tiles by group 0, of odd ones by group 1
    sums   [rows, rank] = softmax(scores) latents                  of all tiles; each group has half of the dimensions

    group 0     scores 2 | sums 1 | softmax 2 ─┐       sums 2 | scores 4 | sums 3 | softmax 4
    group 1         ... softmax 1 | sums 1     └─ scores 3 | sums 2 | softmax 3 ─> ...

Queries are the rows of the products. A group starts the scores of its tile, adds the other group's previous tile to
its sums, continues the other's running softmax with its own tile, hands that over (`Exchange`), and adds its own tile.
Tiles are counted over the whole share, so that the turns do not depend on items.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from baton.kernels.hopper.rings import barrier, clear_tail, new_barriers, record
from baton.kernels.pdl import let_next_start, wait_for_previous
from baton.kernels.split_kv import LOWEST

from .absorbed_output import Results, Work, store_lse, store_rows
from .absorbed_tma import (
    LOADER_REGISTERS,
    LOADERS,
    AbsorbedShape,
    LatentCache,
    QueryBoxes,
    load_pages,
    load_queries,
    new_rings,
)

TILE = gl.constexpr(32)  # keys
STAGES = gl.constexpr(4)
PLACES = gl.constexpr(2)  # of `Exchange`: with one, groups would wait for each other
GROUPS = gl.constexpr(2)
REGISTERS = 168  # all that there are: a program takes all of the shared memory, too
GROUP_REGISTERS = gl.constexpr(232)  # of a thread of group 1; as many are left for group 0
BARE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@record
class Exchange:
    """The running softmax after a tile, from the group that computed it to the other: place n % PLACES is of tile n.

    A place is free again when both groups have released the tile that used it.
    """

    weights: gl.shared_memory_descriptor  # [PLACES, ROWS, TILE] exponentials of the tile
    tops: gl.shared_memory_descriptor  # [PLACES, ROWS] top score so far
    totals: gl.shared_memory_descriptor  # [PLACES, ROWS] sum of exponentials so far
    ready: gl.shared_memory_descriptor  # a barrier for each group that hands over


@gluon.jit
def new_exchange(dtype: gl.constexpr, shape):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(2 * shape.TILE, 16, 2)
    return Exchange(
        gl.allocate_shared_memory(dtype, [PLACES, shape.ROWS, shape.TILE], LAYOUT),
        gl.allocate_shared_memory(gl.float32, [PLACES, shape.ROWS], BARE),
        gl.allocate_shared_memory(gl.float32, [PLACES, shape.ROWS], BARE),
        new_barriers(GROUPS, 1),
    )


@gluon.jit
def _consume(work, results, scale, queries, ring, exchange, GROUP: gl.constexpr, shape):
    DIMS: gl.constexpr = shape.RANK // GROUPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.TILE, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS, 16])
    ROWS_OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    if GROUP == 0:
        let_next_start()
    query_of_row = gl.arange(0, shape.ROWS, ROWS_OF_SCORES) // shape.HEADS
    tile, share_end, number = work.share()
    n = 0
    turn = 0
    wait_for_previous()
    while tile < share_end:
        number = work.item_with(tile, number)
        item = work.item(number, tile, share_end)
        num_visible = gl.minimum(item.num_visible + query_of_row, item.num_keys)  # number of keys that each row sees
        top = gl.full([shape.ROWS], LOWEST, gl.float32, ROWS_OF_SCORES)
        total = gl.zeros([shape.ROWS], gl.float32, ROWS_OF_SCORES)
        sums = gl.zeros([shape.ROWS, DIMS], gl.float32, SUMS)
        queries.latents.await_full(turn)
        end = n + item.tiles
        own = n + ((n ^ GROUP) & 1)  # the first tile of this group
        if own == n:  # no other tile's softmax to continue
            scores = _start_scores(queries, ring, turn, own, SCORES, shape)
            scores = hopper.warpgroup_mma_wait(0, deps=[scores])
            weights, top, total, _ = _soften(scores * scale, top, total, num_visible, item.first, shape)
            weights = _hand_over(weights, top, total, own, ring, exchange, GROUP, SUMS)
            _clear_tail(ring, own, item.first, item, GROUP, shape)
            sums = hopper.warpgroup_mma(weights, ring.latents.part(own, GROUP, GROUPS), sums, is_async=True)
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            _release(ring, own)
            own += 2
        for own_tile in range(own, end, 2):
            index = item.first + own_tile - n
            scores = _start_scores(queries, ring, turn, own_tile, SCORES, shape)
            sums, top, total = _take_over(sums, top, own_tile - 1, exchange, GROUP)
            sums = _start_sums_of_other(sums, own_tile - 1, ring, exchange, GROUP)
            scores = hopper.warpgroup_mma_wait(1, deps=[scores])
            weights, top, total, shrink = _soften(scores * scale, top, total, num_visible, index, shape)
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            _release(ring, own_tile - 1)
            weights = _hand_over(weights, top, total, own_tile, ring, exchange, GROUP, SUMS)
            _clear_tail(ring, own_tile, index, item, GROUP, shape)
            sums = sums * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, SUMS)), 1)
            sums = hopper.warpgroup_mma(weights, ring.latents.part(own_tile, GROUP, GROUPS), sums, is_async=True)
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            _release(ring, own_tile)
        if ((end - 1) ^ GROUP) & 1:  # the last tile is the other group's
            sums, top, total = _take_over(sums, top, end - 1, exchange, GROUP)
            _clear_tail(ring, end - 1, item.first + item.tiles - 1, item, GROUP, shape)
            sums = _start_sums_of_other(sums, end - 1, ring, exchange, GROUP)
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            _release(ring, end - 1)
        total = gl.where(total == 0.0, 1.0, total)  # in a part, a query may see no key
        # Both groups have all of their scores: results pass through the memory of the queries.
        memory = queries.latents.part(turn, GROUP, GROUPS)
        factor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))
        memory.store((sums * gl.expand_dims(factor, 1)).to(memory.dtype))
        store_rows(memory, GROUP * DIMS, item, results, shape)
        if GROUP == 0:
            store_lse(top, total, item, results, ROWS_OF_SCORES, shape)
        hopper.fence_async_shared()
        barrier()
        queries.latents.release(turn)
        turn += 1
        number += 1
        tile += item.tiles
        n = end


@gluon.jit
def _start_scores(queries, ring, turn, n, SCORES: gl.constexpr, shape):
    """Start the scores of tile n, once it has arrived."""
    ring.latents.await_full(n)
    scores = gl.zeros([shape.ROWS, shape.TILE], gl.float32, SCORES)
    keys = ring.ropes.tile(n).permute((1, 0))
    scores = hopper.warpgroup_mma(queries.ropes.tile(turn), keys, scores, use_acc=False, is_async=True)
    keys = ring.latents.tile(n).permute((1, 0))
    return hopper.warpgroup_mma(queries.latents.tile(turn), keys, scores, is_async=True)


@gluon.jit
def _soften(scores, top, total, num_visible, index, shape):
    """Continue a running softmax with tile `index` of an item. Return (weights, top, total, factor of earlier sums)."""
    key = index * shape.TILE + gl.arange(0, shape.TILE, gl.SliceLayout(0, scores.type.layout))
    scores = gl.where(gl.expand_dims(key, 0) < gl.expand_dims(num_visible, 1), scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    weights = gl.exp2(scores - gl.expand_dims(new_top, 1))
    shrink = gl.exp2(top - new_top)
    return weights, new_top, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _hand_over(weights, top, total, n, ring, exchange, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Give the other group the softmax after tile n. Return the weights as an operand of products."""
    weights = weights.to(exchange.weights.dtype)
    ring.latents.await_free(n - PLACES + STAGES)  # tile n - PLACES has been released
    exchange.weights.index(n % PLACES).store(weights)
    exchange.tops.index(n % PLACES).store(top)
    exchange.totals.index(n % PLACES).store(total)
    hopper.fence_async_shared()
    barrier()
    mbarrier.arrive(exchange.ready.index(GROUP))
    return gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))


@gluon.jit
def _take_over(sums, top, n, exchange, GROUP: gl.constexpr):
    """Wait for the other group's softmax after tile n; return (sums relative to its top, its top, its total)."""
    mbarrier.wait(exchange.ready.index(1 - GROUP), n // GROUPS & 1)
    new_top = exchange.tops.index(n % PLACES).load(top.type.layout)
    total = exchange.totals.index(n % PLACES).load(top.type.layout)
    shrink = gl.convert_layout(gl.exp2(top - new_top), gl.SliceLayout(1, sums.type.layout))
    return sums * gl.expand_dims(shrink, 1), new_top, total


@gluon.jit
def _start_sums_of_other(sums, n, ring, exchange, GROUP: gl.constexpr):
    """Start to add tile n with the weights that the other group has computed."""
    ring.latents.await_full(n)
    values = ring.latents.part(n, GROUP, GROUPS)
    return hopper.warpgroup_mma(exchange.weights.index(n % PLACES), values, sums, is_async=True)


@gluon.jit
def _clear_tail(ring, n, index, item, GROUP: gl.constexpr, shape):
    """Zero this group's dimensions of rows behind the last key in tile n, which is the item's tile `index`."""
    if (index + 1) * shape.TILE > item.num_keys:
        clear_tail(ring.latents, n, item.num_keys, shape.PAGE, 4, GROUP, GROUPS)


@gluon.jit
def _release(ring, n):
    barrier()  # all warps have read it
    ring.latents.release(n)


@gluon.jit(do_not_specialize=["layer", "num_whole_rows"])
def attend_share(
    q_latents,
    q_ropes,
    pages,
    results,
    lse,
    items,
    starts,
    shares,
    block_tables,
    scale,
    layer,
    num_layers,
    table_stride,
    num_heads,
    num_whole_rows,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Compute one share of the tiles, for one group of heads, as `absorbed_narrow.attend_share`."""
    shape = AbsorbedShape(QUERIES, HEADS, RANK, PAGE, TILE)
    queries = new_rings(pages.dtype, 1, shape.ROWS, RANK, 1, GROUPS)
    ring = new_rings(pages.dtype, STAGES, TILE, RANK, LOADERS, GROUPS)
    exchange = new_exchange(pages.dtype, shape)
    hopper.fence_async_shared()
    work = Work(items, starts, shares)
    output = Results(results, lse, num_whole_rows, num_heads)
    cache = LatentCache(pages, layer, num_layers, block_tables, table_stride)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    HALF: gl.constexpr = TILE // PAGE // LOADERS
    gl.warp_specialize(
        [
            (_consume, (work, output, scale, queries, ring, exchange, ZERO, shape)),
            (_consume, (work, output, scale, queries, ring, exchange, ONE, shape)),
            (load_pages, (work, cache, ring, ZERO, shape)),
            (load_pages, (work, cache, ring, HALF, shape)),
            (load_queries, (work, QueryBoxes(q_latents, q_ropes), queries, shape)),
        ],
        [4, 1, 1, 1],
        [GROUP_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )

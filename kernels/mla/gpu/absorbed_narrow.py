"""Absorbed MLA for Hopper with up to 32 heads of one query: one warp group multiplies.

    TMA ──pages──> ring of tiles in shared memory ──> scores [tile, rows] = latents q_latent + ropes q_rope
                                                  ──> sums   [rank, rows] = latents^T softmax(scores)

Keys and latent dimensions are the rows of the products, so that 16 query heads suffice to fill them. A tile is read
from memory once, for keys and values. Two tiles of queries are in flight.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from baton.kernels.hopper.rings import barrier, clear_tail
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

TILE = gl.constexpr(64)  # keys: the rows of one product of a warp group
STAGES = gl.constexpr(2)
QUERY_STAGES = gl.constexpr(2)
REGISTERS = 152  # of a thread at the start: with all that there are, no other kernel's program could be beside one


@gluon.jit
def _consume(work, results, scale, query_ring, ring, weight_memory, shape):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.ROWS, 16])
    let_next_start()
    q_latent, q_rope = query_ring.latents, query_ring.ropes
    latents, ropes = ring.latents, ring.ropes
    key_in_tile = gl.arange(0, TILE, gl.SliceLayout(1, SCORES))
    tile, share_end, number = work.share()
    n = 0
    turn = 0
    wait_for_previous()
    while tile < share_end:
        number = work.item_with(tile, number)
        item = work.item(number, tile, share_end)
        top = gl.full([shape.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, SCORES))
        weights = gl.zeros([TILE, shape.ROWS], gl.float32, SCORES)  # one sum per key position in a tile
        sums = gl.zeros([shape.RANK, shape.ROWS], gl.float32, SCORES)
        q_latent.await_full(turn)
        for index in range(item.first, item.first + item.tiles):
            latents.await_full(n)
            is_cut = (index + 1) * TILE > item.num_keys
            if is_cut:
                clear_tail(latents, n, item.num_keys, shape.PAGE)
            scores = gl.zeros([TILE, shape.ROWS], gl.float32, SCORES)
            query = q_rope.tile(turn).permute((1, 0))
            scores = hopper.warpgroup_mma(ropes.tile(n), query, scores, use_acc=False, is_async=True)
            query = q_latent.tile(turn).permute((1, 0))
            scores = hopper.warpgroup_mma(latents.tile(n), query, scores, is_async=True)
            scores = hopper.warpgroup_mma_wait(0, deps=[scores]) * scale
            if is_cut:
                key = gl.expand_dims(index * TILE + key_in_tile, 1)
                scores = gl.where(key < item.num_keys, scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 0))
            probabilities = gl.exp2(scores - gl.expand_dims(new_top, 0))
            shrink = gl.expand_dims(gl.exp2(top - new_top), 0)
            weight_memory.store(probabilities.to(weight_memory.dtype))
            hopper.fence_async_shared()
            weights = weights * shrink + probabilities
            values = latents.tile(n).permute((1, 0))
            sums = hopper.warpgroup_mma(values, weight_memory, sums * shrink, is_async=True)
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            latents.release(n)
            top = new_top
            n += 1
        weight = gl.sum(weights, 0)  # positive: every part of an item with one query has a key that the query sees
        memory = q_latent.tile(turn)
        barrier()  # all warps have read the queries, whose memory results pass through
        memory.permute((1, 0)).store((sums * gl.expand_dims(1.0 / weight, 0)).to(memory.dtype))
        store_rows(memory, 0, item, results, shape)
        store_lse(top, weight, item, results, gl.SliceLayout(0, SCORES), shape)
        hopper.fence_async_shared()
        barrier()
        q_latent.release(turn)
        turn += 1
        number += 1
        tile += item.tiles


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
    """Compute one share of the tiles, for one group of heads.

    `pages` has boxes [page, slab] of kv, viewed as rows of latents.
    """
    shape = AbsorbedShape(QUERIES, HEADS, RANK, PAGE, TILE)
    query_ring = new_rings(pages.dtype, QUERY_STAGES, shape.ROWS, RANK, 1, 1)
    ring = new_rings(pages.dtype, STAGES, TILE, RANK, LOADERS, 1)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(2 * shape.ROWS, 16, 2)
    weight_memory = gl.allocate_shared_memory(pages.dtype, [TILE, shape.ROWS], LAYOUT)
    hopper.fence_async_shared()
    work = Work(items, starts, shares)
    cache = LatentCache(pages, layer, num_layers, block_tables, table_stride)
    NONE: gl.constexpr = 0
    HALF: gl.constexpr = TILE // PAGE // LOADERS
    gl.warp_specialize(
        [
            (
                _consume,
                (work, Results(results, lse, num_whole_rows, num_heads), scale, query_ring, ring, weight_memory, shape),
            ),
            (load_pages, (work, cache, ring, NONE, shape)),
            (load_pages, (work, cache, ring, HALF, shape)),
            (load_queries, (work, QueryBoxes(q_latents, q_ropes), query_ring, shape)),
        ],
        [1, 1, 1],
        [LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )

"""Absorbed MLA for Hopper, warp-specialized: three warps load by TMA, one or two warp groups multiply.

    TMA ──pages──> ring of tiles in shared memory ──> scores [tile, rows] = latents q_latent + ropes q_rope
                                                  ──> sums   [rank, rows] = latents^T softmax(scores)

Keys and latent dimensions are the rows of the products, so that 16 query heads suffice to fill a warp group's products.
A tile is read from memory once, for keys and values. Work is partitioned as in `work_list`; outputs are the same as
those of `absorbed`.

    narrow    up to 32 heads of one query          one warp group; two tiles of queries in flight
    wide      64 rows: heads of several queries    two warp groups, which divide the rows for the scores, and the
                                                   dimensions of latents for the sums; one tile of queries

Only the newest latent of a decode is written in this step. So pages are loaded while the previous kernels still run: a
loader warp waits for them only when it reaches the last tile of a sequence. For sequences that are not decodes, it
waits at once: a single token after longer chunks may share a prefix with them, and a later part of a chunk reads an
earlier one, all written in this step. A third warp loads queries.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.hopper.flash import Partial
from baton.kernels.hopper.rings import (
    BOX,
    SLAB,
    Ring,
    Value,
    async_load,
    barrier,
    clear_tail,
    new_barriers,
    record,
    view,
)
from baton.kernels.hopper.stored_parts import columns
from baton.kernels.launch import is_hopper
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous
from baton.kernels.split_kv import LOG2_E, LOWEST

from .absorbed_output import AbsorbedOutput, AbsorbedParts, Padding, Work, finish
from .combine import combine
from .work_list import WorkList, WorkTiles

TILE = gl.constexpr(64)  # keys: the rows of one product of a warp group
STAGES = gl.constexpr(2)
NARROW_ROWS = gl.constexpr(32)  # most rows whose sums fit in the registers of one warp group
WIDE_ROWS = 64  # ... and of two
LEAST_HEADS = 8  # heads of a query: the rows of a TMA box must cover the swizzle's pattern
LOADERS = gl.constexpr(2)  # warps that load pages: a single one would need as long per tile as its products
LOADER_REGISTERS = gl.constexpr(40)
REGISTERS = 152  # of a thread at the start: with all that there are, no other kernel's program could be beside one
WIDE_REGISTERS = 168  # all that there are: a wide program takes all of the shared memory, too
FEW_ITEMS = 32  # items x groups of heads, up to which a second kernel combines parts


def serves(q_latent: Tensor, q_rope: Tensor, kv: Tensor, tiles: WorkTiles) -> bool:
    """Return whether this kernel supports the device and the shapes."""
    page, width = kv.shape[4:]
    return (
        is_hopper(kv.device)
        and kv.dtype.itemsize == 2
        and kv.is_contiguous()
        and q_rope.shape[2] == SLAB.value
        and width % SLAB.value == 0
        and TILE.value % (page * LOADERS.value) == 0
        and tiles.tile == TILE.value
        and (
            (tiles.queries == 1 and tiles.rows <= NARROW_ROWS.value)
            or (tiles.rows == WIDE_ROWS and tiles.heads >= LEAST_HEADS)
        )
        and fits_boxes(q_latent)
        and fits_boxes(q_rope)
    )


def fits_boxes(matrix: Tensor) -> bool:
    """Return whether TMA can read the matrix: rows must begin at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and all(step * matrix.itemsize % 16 == 0 for step in matrix.stride()[:-1])


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    work: WorkList,
    tiles: WorkTiles,
    *,
    scale: float,
    out: Tensor,
    pads: bool,
) -> None:
    """Compute the same as `absorbed.latent_attention`.

    With few items, or wide ones, whose parts are large, `combine` adds the parts, with many programs per item: the
    program that finishes last would do it alone, while the others are idle.
    """
    num_heads, rank = q_latent.shape[1:]
    groups = tiles.groups(num_heads)
    wide = tiles.rows > NARROW_ROWS.value
    apart = wide or work.max_items * groups <= FEW_ITEMS
    parts = torch.empty((groups, work.num_programs, 2, tiles.rows, rank), dtype=torch.float32, device=out.device)
    softmax = torch.empty((groups, work.num_programs, 2, tiles.rows, 2), dtype=torch.float32, device=out.device)
    page, width = kv.shape[4:]
    query_box = gl.NVMMASharedLayout(128, 16, 3)
    attend_share[(work.num_programs, groups)](
        TensorDescriptor.from_tensor(q_latent, [tiles.queries, tiles.heads, SLAB.value], query_box),
        TensorDescriptor.from_tensor(q_rope, [tiles.queries, tiles.heads, SLAB.value], query_box),
        TensorDescriptor.from_tensor(kv.view(-1, width), [page, SLAB.value], BOX.value),
        out,
        parts,
        softmax,
        work.arrivals,
        work.items,
        work.starts,
        work.shares,
        batch.block_tables,
        batch.slots,
        scale * LOG2_E.value,
        layer,
        kv.shape[2],
        batch.block_tables.stride(0),
        num_heads,
        out.shape[0] if pads else 0,
        work.max_items,
        batch.num_decodes,
        QUERIES=tiles.queries,
        HEADS=tiles.heads,
        RANK=rank,
        PAGE=page,
        APART=apart,
        num_warps=8 if wide else 4,
        maxnreg=WIDE_REGISTERS if wide else REGISTERS,
        **launch_options(),
    )
    if apart:
        combine(parts, softmax, batch, work, tiles.heads, out=out, pads=pads)


@aggregate
class AbsorbedShape:
    """The compile-time sizes of the kernel."""

    QUERIES: gl.constexpr
    HEADS: gl.constexpr  # heads of a group, with padding
    ROWS: gl.constexpr  # QUERIES * HEADS
    RANK: gl.constexpr
    PAGE: gl.constexpr
    APART: gl.constexpr
    WARPS: gl.constexpr  # number of multiplying warps
    SCORES: gl.constexpr  # register layout of the products' results
    SUMS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, QUERIES, HEADS, RANK, PAGE, APART):
        rows = QUERIES * HEADS
        groups = 2 if rows > NARROW_ROWS.value else 1
        self.QUERIES = gl.constexpr(QUERIES)
        self.HEADS = gl.constexpr(HEADS)
        self.ROWS = gl.constexpr(rows)
        self.RANK = gl.constexpr(RANK)
        self.PAGE = gl.constexpr(PAGE)
        self.APART = gl.constexpr(APART)
        self.WARPS = gl.constexpr(4 * groups)
        self.SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, groups], [16, rows // groups, 16]))
        self.SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4 * groups, 1], [16, rows, 16]))


@record
class QueryBoxes:
    """TMA descriptors of the queries."""

    latents: Value
    ropes: Value


@record
class LatentCache:
    """One layer of the cache, and the sequences' block tables."""

    pages: Value  # TMA descriptor with boxes [page, slab] of kv viewed as rows of latents
    layer: gl.tensor
    num_layers: Value
    block_tables: gl.tensor
    table_stride: Value


@record
class LatentRings:
    """The rings of latents and of rope parts, which are filled and released together."""

    latents: Ring
    ropes: Ring


@gluon.jit
def _load_queries(work, queries, ring, padding, shape):
    """Load the queries of every item of the share by TMA, and zero the rows of padding tokens."""
    q_latent, q_rope = ring.latents, ring.ropes
    BOXES: gl.constexpr = queries.latents.layout
    first_head = gl.program_id(1) * shape.HEADS
    tile, share_end, number = work.share()
    n = 0
    wait_for_previous()
    while tile < share_end:
        item = work.item(number, share_end)
        q_latent.await_free(n)
        mbarrier.expect(q_latent.barrier(n), shape.ROWS * (shape.RANK + SLAB) * 2)
        for slab in gl.static_range(shape.RANK // SLAB):
            box = view(q_latent.slab(n, slab), [shape.QUERIES, shape.HEADS, SLAB], BOXES)
            async_load(queries.latents, [item.token, first_head, slab * SLAB], q_latent.barrier(n), box)
        box = view(q_rope.slab(n, 0), [shape.QUERIES, shape.HEADS, SLAB], BOXES)
        async_load(queries.ropes, [item.token, first_head, 0], q_latent.barrier(n), box)
        n += 1
        number += 1
        tile = item.end
    if not shape.APART:
        padding.clear(first_head, shape)


@gluon.jit
def _load_pages(work, num_decodes, cache, ring, FIRST: gl.constexpr, shape):
    """Load half the pages of every tile of the share by TMA, from FIRST on."""
    latents, ropes = ring.latents, ring.ropes
    PAGES: gl.constexpr = TILE // shape.PAGE
    OWN: gl.constexpr = PAGES // LOADERS
    tile, share_end, number = work.share()
    n = 0
    while tile < share_end:
        if (shape.QUERIES > 1) | (number >= num_decodes):
            wait_for_previous()
        item = work.item(number, share_end)
        num_pages = gl.cdiv(item.num_keys, shape.PAGE)
        table = cache.block_tables + item.table_row.to(gl.int64) * cache.table_stride
        for index in range(tile - item.start, item.end - item.start):
            places = ()  # pages after the sequence's last become rows after the last row, which TMA loads as zeros
            for i in gl.static_range(OWN):
                page = index * PAGES + FIRST + i
                exists = page < num_pages
                block = gl.load(table + page, mask=exists, other=0)
                places = places + (
                    gl.where(exists, (block * cache.num_layers + cache.layer) * shape.PAGE, cache.pages.shape[0]),
                )
            if (index + 1) * TILE >= item.num_keys:
                wait_for_previous()  # the newest latent is written in this step
            latents.await_free(n)
            mbarrier.expect(latents.barrier(n), OWN * shape.PAGE * (shape.RANK + SLAB) * 2)
            for i in gl.static_range(OWN):
                for slab in gl.static_range(shape.RANK // SLAB):
                    box = view(latents.slab(n, slab), [PAGES, shape.PAGE, SLAB], BOX).index(FIRST + i)
                    async_load(cache.pages, [places[i], slab * SLAB], latents.barrier(n), box)
                box = view(ropes.slab(n, 0), [PAGES, shape.PAGE, SLAB], BOX).index(FIRST + i)
                async_load(cache.pages, [places[i], shape.RANK], latents.barrier(n), box)
            n += 1
        number += 1
        tile = item.end


@gluon.jit
def _consume(work, output, scale, query_ring, ring, weight_memory, shape):
    let_next_start()
    q_latent, q_rope = query_ring.latents, query_ring.ropes
    latents, ropes = ring.latents, ring.ropes
    key_in_tile = gl.arange(0, TILE, gl.SliceLayout(1, shape.SCORES))
    query_of_row = columns(shape.ROWS, shape.SCORES) // shape.HEADS
    tile, share_end, number = work.share()
    n = 0
    turn = 0
    wait_for_previous()
    while tile < share_end:
        item = work.item(number, share_end)
        num_visible = gl.minimum(item.num_visible + query_of_row, item.num_keys)  # number of keys that each row sees
        top = gl.full([shape.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, shape.SCORES))
        weights = gl.zeros([TILE, shape.ROWS], gl.float32, shape.SCORES)  # one sum per key position in a tile
        sums = gl.zeros([shape.RANK, shape.ROWS], gl.float32, shape.SUMS)
        q_latent.await_full(turn)
        for index in range(tile - item.start, item.end - item.start):
            latents.await_full(n)
            is_cut = (index + 1) * TILE > item.num_visible
            if (index + 1) * TILE > item.num_keys:
                clear_tail(latents, n, item.num_keys, shape.PAGE, shape.WARPS)
            scores = gl.zeros([TILE, shape.ROWS], gl.float32, shape.SCORES)
            query = q_rope.tile(turn).permute((1, 0))
            scores = hopper.warpgroup_mma(ropes.tile(n), query, scores, use_acc=False, is_async=True)
            query = q_latent.tile(turn).permute((1, 0))
            scores = hopper.warpgroup_mma(latents.tile(n), query, scores, is_async=True)
            scores = hopper.warpgroup_mma_wait(0, deps=[scores]) * scale
            if is_cut:
                key = gl.expand_dims(index * TILE + key_in_tile, 1)
                scores = gl.where(key < gl.expand_dims(num_visible, 0), scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 0))
            probabilities = gl.exp2(scores - gl.expand_dims(new_top, 0))
            shrink = gl.exp2(top - new_top)
            weight_memory.store(probabilities.to(weight_memory.dtype))
            hopper.fence_async_shared()
            weights = weights * gl.expand_dims(shrink, 0) + probabilities
            shrink = gl.convert_layout(shrink, gl.SliceLayout(0, shape.SUMS))
            values = latents.tile(n).permute((1, 0))
            sums = hopper.warpgroup_mma(values, weight_memory, sums * gl.expand_dims(shrink, 0), is_async=True)
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            if shape.WARPS > 4:
                barrier()  # one thread releases for both warp groups
            latents.release(n)
            top = new_top
            n += 1
        q_latent.release(turn)
        turn += 1
        weight = gl.convert_layout(gl.sum(weights, 0), gl.SliceLayout(0, shape.SUMS))
        top = gl.convert_layout(top, gl.SliceLayout(0, shape.SUMS))
        finish(Partial(sums, weight, top), number, tile, item.end, work, output, shape)
        number += 1
        tile = item.end


@gluon.jit
def _new_rings(
    dtype: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, RANK: gl.constexpr, fetchers: gl.constexpr
):
    """Return rings for latents and for their rope parts, which share their barriers."""
    full, free = new_barriers(stages, fetchers), new_barriers(stages, 1)
    latents = gl.allocate_shared_memory(dtype, [stages * (RANK // SLAB), rows, SLAB], BOX)
    ropes = gl.allocate_shared_memory(dtype, [stages, rows, SLAB], BOX)
    return LatentRings(Ring(latents, full, free), Ring(ropes, full, free))


@gluon.jit(do_not_specialize=["layer", "num_padded_tokens", "max_items", "num_decodes"])
def attend_share(
    q_latents,
    q_ropes,
    pages,
    out,
    sums,
    softmax,
    arrivals,
    items,
    starts,
    shares,
    block_tables,
    slots,
    scale,
    layer,
    num_layers,
    table_stride,
    num_heads,
    num_padded_tokens,
    max_items,
    num_decodes,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    PAGE: gl.constexpr,
    APART: gl.constexpr,
):
    """Compute one share of the tiles, for one group of heads.

    `pages` has boxes [page, slab] of kv, viewed as rows of latents. Of the first `num_padded_tokens` tokens, those of
    slot -1 become zero, unless `combine` does that.
    """
    shape = AbsorbedShape(QUERIES, HEADS, RANK, PAGE, APART)
    ROWS: gl.constexpr = shape.ROWS
    QUERY_STAGES: gl.constexpr = 2 if ROWS <= NARROW_ROWS else 1
    query_ring = _new_rings(pages.dtype, QUERY_STAGES, ROWS, RANK, 1)
    ring = _new_rings(pages.dtype, STAGES, TILE, RANK, LOADERS)
    weight_memory = gl.allocate_shared_memory(pages.dtype, [TILE, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16, 2))
    hopper.fence_async_shared()
    work = Work(items, starts, shares, max_items)
    cache = LatentCache(pages, layer, num_layers, block_tables, table_stride)
    padding = Padding(out, slots, num_padded_tokens, num_heads)
    output = AbsorbedOutput(out, num_heads, AbsorbedParts(sums, softmax, arrivals))
    NONE: gl.constexpr = 0
    HALF: gl.constexpr = TILE // PAGE // LOADERS
    gl.warp_specialize(
        [
            (_consume, (work, output, scale, query_ring, ring, weight_memory, shape)),
            (_load_pages, (work, num_decodes, cache, ring, NONE, shape)),
            (_load_pages, (work, num_decodes, cache, ring, HALF, shape)),
            (_load_queries, (work, QueryBoxes(q_latents, q_ropes), query_ring, padding, shape)),
        ],
        [1, 1, 1],
        [LOADER_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )

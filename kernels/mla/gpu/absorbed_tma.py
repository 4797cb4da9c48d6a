"""Absorbed MLA for Hopper: the three warps that load by TMA, for both kernels (`absorbed_narrow`, `absorbed_wide`).

    two warps     pages of latents ──> ring of tiles        one page after the other in turns
    one warp      queries          ──> ring of queries      one tile per item

Only the newest latents of a decode are written in this step, one for each of its query tokens. So pages are loaded
while the previous kernels still run: a loader waits for them only when it reaches a tile with a key that is not cached
yet. For other sequences it waits at once: they may share a prefix with a chunk that is written in this step.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from baton.kernels.hopper.rings import BOX, SLAB, Ring, Value, async_load, new_barriers, record, view
from baton.kernels.pdl import wait_for_previous

LOADERS = gl.constexpr(2)  # warps that load pages: a single one would need as long per tile as its products
LOADER_REGISTERS = gl.constexpr(40)
QUERY_BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))  # [queries, heads, SLAB]


@aggregate
class AbsorbedShape:
    """The compile-time sizes of a kernel."""

    QUERIES: gl.constexpr
    HEADS: gl.constexpr  # heads of a group, with padding
    ROWS: gl.constexpr  # QUERIES * HEADS
    RANK: gl.constexpr
    PAGE: gl.constexpr
    TILE: gl.constexpr  # keys

    @gluon.constexpr_function
    def __init__(self, QUERIES, HEADS, RANK, PAGE, TILE):
        self.QUERIES = gl.constexpr(QUERIES)
        self.HEADS = gl.constexpr(HEADS)
        self.ROWS = gl.constexpr(QUERIES * HEADS)
        self.RANK = gl.constexpr(RANK)
        self.PAGE = gl.constexpr(PAGE)
        self.TILE = gl.constexpr(TILE)


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
    """The rings of latents and of rope parts, which share their barriers."""

    latents: Ring
    ropes: Ring


@gluon.jit
def new_rings(
    dtype: gl.constexpr,
    stages: gl.constexpr,
    rows: gl.constexpr,
    RANK: gl.constexpr,
    loaders: gl.constexpr,
    consumers: gl.constexpr,
):
    """Return rings of tiles with this many rows, each filled by `loaders` warps and released by `consumers`."""
    full, free = new_barriers(stages, loaders), new_barriers(stages, consumers)
    latents = gl.allocate_shared_memory(dtype, [stages * (RANK // SLAB), rows, SLAB], BOX)
    ropes = gl.allocate_shared_memory(dtype, [stages, rows, SLAB], BOX)
    return LatentRings(Ring(latents, full, free), Ring(ropes, full, free))


@gluon.jit
def load_queries(work, queries, ring, shape):
    """Load the queries of every item of the share."""
    q_latent, q_rope = ring.latents, ring.ropes
    first_head = gl.program_id(1) * shape.HEADS
    tile, share_end, number = work.share()
    n = 0
    wait_for_previous()
    while tile < share_end:
        number = work.item_with(tile, number)
        item = work.item(number, tile, share_end)
        q_latent.await_free(n)
        mbarrier.expect(q_latent.barrier(n), shape.ROWS * (shape.RANK + SLAB) * 2)
        for slab in gl.static_range(shape.RANK // SLAB):
            box = view(q_latent.slab(n, slab), [shape.QUERIES, shape.HEADS, SLAB], QUERY_BOX)
            async_load(queries.latents, [item.token, first_head, slab * SLAB], q_latent.barrier(n), box)
        box = view(q_rope.slab(n, 0), [shape.QUERIES, shape.HEADS, SLAB], QUERY_BOX)
        async_load(queries.ropes, [item.token, first_head, 0], q_latent.barrier(n), box)
        n += 1
        number += 1
        tile += item.tiles


@gluon.jit
def load_pages(work, cache, ring, FIRST: gl.constexpr, shape):
    """Load this loader's pages of every tile of the share: from page FIRST of the tile on."""
    latents, ropes = ring.latents, ring.ropes
    PAGES: gl.constexpr = shape.TILE // shape.PAGE
    OWN: gl.constexpr = PAGES // LOADERS
    tile, share_end, number = work.share()
    n = 0
    while tile < share_end:
        number = work.item_with(tile, number)
        item = work.item(number, tile, share_end)
        num_pages = gl.cdiv(item.num_keys, shape.PAGE)
        table = cache.block_tables + item.table_row.to(gl.int64) * cache.table_stride
        for index in range(item.first, item.first + item.tiles):
            places = ()  # pages after the sequence's last become rows after the last row, which TMA loads as zeros
            for i in gl.static_range(OWN):
                page = index * PAGES + FIRST + i
                exists = page < num_pages
                block = gl.load(table + page, mask=exists, other=0)
                places = places + (
                    gl.where(exists, (block * cache.num_layers + cache.layer) * shape.PAGE, cache.pages.shape[0]),
                )
            if (index + 1) * shape.TILE > item.num_cached:
                wait_for_previous()
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
        tile += item.tiles

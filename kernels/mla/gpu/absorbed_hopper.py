"""Absorbed MLA for Hopper, warp-specialized: three warps load by TMA, one or two warp groups multiply.

    absorbed_tma       the loaders
    absorbed_narrow    up to 32 heads of one query: one warp group
    absorbed_wide      64 rows, heads of several queries: two warp groups

Work is partitioned as in `work_list`; results are the same as those of `absorbed`.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.hopper.rings import BOX, SLAB
from baton.kernels.launch import is_hopper
from baton.kernels.pdl import launch_options
from baton.kernels.split_kv import LOG2_E

from . import absorbed_narrow, absorbed_wide
from .absorbed_tma import LOADERS, QUERY_BOX
from .partial_results import PartialResults
from .work_list import WorkList, WorkTiles

NARROW_ROWS = 32  # most rows whose sums fit in the registers of one warp group
WIDE_ROWS = 64  # ... and of two
LEAST_HEADS = 8  # heads of a query: the rows of a TMA box must cover the swizzle's pattern
NARROW_TILE = absorbed_narrow.TILE.value  # keys
WIDE_TILE = absorbed_wide.TILE.value


def serves(q_latent: Tensor, q_rope: Tensor, kv: Tensor, tiles: WorkTiles) -> bool:
    """Return whether one of the kernels supports the device and the shapes."""
    page, width = kv.shape[4:]
    is_narrow = tiles.queries == 1 and tiles.rows <= NARROW_ROWS and tiles.tile == NARROW_TILE
    is_wide = tiles.rows == WIDE_ROWS and tiles.heads >= LEAST_HEADS and tiles.tile == WIDE_TILE
    return (
        is_hopper(kv.device)
        and kv.dtype.itemsize == 2
        and kv.is_contiguous()
        and q_rope.shape[2] == SLAB.value
        and width % SLAB.value == 0
        and tiles.tile % (page * LOADERS.value) == 0
        and (is_narrow or is_wide)
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
    *,
    scale: float,
    results: PartialResults,
) -> None:
    """Compute the same as `absorbed.latent_attention`."""
    num_tokens, num_heads, rank = q_latent.shape
    tiles, (page, width) = work.tiles, kv.shape[4:]
    kernel = absorbed_wide if tiles.rows > NARROW_ROWS else absorbed_narrow
    kernel.attend_share[(work.num_programs, tiles.groups(num_heads))](
        TensorDescriptor.from_tensor(q_latent, [tiles.queries, tiles.heads, SLAB.value], QUERY_BOX.value),
        TensorDescriptor.from_tensor(q_rope, [tiles.queries, tiles.heads, SLAB.value], QUERY_BOX.value),
        TensorDescriptor.from_tensor(kv.view(-1, width), [page, SLAB.value], BOX.value),
        results.attended,
        results.lse,
        work.items,
        work.starts,
        work.shares,
        batch.block_tables,
        scale * LOG2_E.value,
        layer,
        kv.shape[2],
        batch.block_tables.stride(0),
        num_heads,
        num_tokens * num_heads,
        QUERIES=tiles.queries,
        HEADS=tiles.heads,
        RANK=rank,
        PAGE=page,
        num_warps=4,
        maxnreg=kernel.REGISTERS,
        **launch_options(),
    )

"""Copies of KV blocks: from the cache to a contiguous buffer, back, and within the cache.

    kv [num_blocks, kv_heads, ...]        a block is one contiguous range, and so is each head's part of it
    staging [n, heads, ...]               n whole blocks, or the parts of some consecutive heads, one after another

An id of -1 stands for no block: nothing is read or written for it.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from . import cpu, reference

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks"]


def gather_blocks(kv: Tensor, block_ids: Tensor, staging: Tensor, first_head: int = 0) -> Tensor:
    """Copy blocks `block_ids` [n] (int32 or int64) of kv into staging [n, heads, ...], which is returned.

    Of each block, only the heads from `first_head` on are copied, as many as `staging` has. Raises `ValueError` for a
    staging buffer whose shape, dtype or layout does not match kv.
    """
    check_staging(kv, block_ids, staging, first_head)
    return _ops(kv).gather_blocks(kv, block_ids, staging, first_head)


def scatter_blocks(staging: Tensor, block_ids: Tensor, kv: Tensor, first_head: int = 0) -> None:
    """Copy staging [n, heads, ...] into blocks `block_ids` of kv, heads from `first_head` on. Ids must differ."""
    check_staging(kv, block_ids, staging, first_head)
    _ops(kv).scatter_blocks(staging, block_ids, kv, first_head)


def copy_blocks(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy block sources[i] to block targets[i], for all i in parallel: no block may be both a source and a target."""
    if sources.shape != targets.shape or sources.dim() != 1:
        raise ValueError(f"{list(sources.shape)} sources and {list(targets.shape)} targets: give one for one")
    _ops(kv).copy_blocks(kv, sources, targets)


def _ops(kv: Tensor) -> ModuleType:
    if kv.is_cuda:
        from . import gpu

        return gpu
    return cpu if kv.is_cpu else reference


def check_staging(kv: Tensor, block_ids: Tensor, staging: Tensor, first_head: int) -> None:
    """Raise `ValueError` unless the staging buffer is contiguous and its blocks match those of kv."""
    heads = staging.shape[1]
    expected = (*block_ids.shape, heads, *kv.shape[2:])
    if staging.dtype != kv.dtype or staging.shape != expected or not (staging.is_contiguous() and kv.is_contiguous()):
        raise ValueError(
            f"staging is {staging.dtype} {list(staging.shape)}: give contiguous {kv.dtype} {list(expected)} for a "
            "contiguous kv"
        )
    if not 0 <= first_head <= kv.shape[1] - heads:
        raise ValueError(f"heads {first_head} to {first_head + heads - 1} are not all among the {kv.shape[1]} of kv")

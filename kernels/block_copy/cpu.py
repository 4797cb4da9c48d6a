"""Copies of KV blocks on a CPU: one memory copy per block, since a block is one contiguous range."""

from __future__ import annotations

from torch import Tensor


def gather_blocks(kv: Tensor, block_ids: Tensor, staging: Tensor, first_head: int) -> Tensor:
    """See `baton.kernels.block_copy.gather_blocks`."""
    heads = slice(first_head, first_head + staging.shape[1])
    for index, block in enumerate(block_ids.tolist()):
        if block >= 0:
            staging[index].copy_(kv[block, heads])
    return staging


def scatter_blocks(staging: Tensor, block_ids: Tensor, kv: Tensor, first_head: int) -> None:
    """See `baton.kernels.block_copy.scatter_blocks`."""
    heads = slice(first_head, first_head + staging.shape[1])
    for index, block in enumerate(block_ids.tolist()):
        if block >= 0:
            kv[block, heads].copy_(staging[index])


def copy_blocks(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See `baton.kernels.block_copy.copy_blocks`."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if source >= 0 and target >= 0:
            kv[target].copy_(kv[source])

"""Reference of KV block copies."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_blocks(kv: Tensor, block_ids: Tensor, staging: Tensor, first_head: int) -> Tensor:
    """See `baton.kernels.block_copy.gather_blocks`."""
    known = block_ids >= 0
    heads = slice(first_head, first_head + staging.shape[1])
    _bits(staging)[known] = _bits(kv)[block_ids[known].long(), heads]
    return staging


def scatter_blocks(staging: Tensor, block_ids: Tensor, kv: Tensor, first_head: int) -> None:
    """See `baton.kernels.block_copy.scatter_blocks`."""
    known = block_ids >= 0
    heads = slice(first_head, first_head + staging.shape[1])
    _bits(kv)[block_ids[known].long(), heads] = _bits(staging)[known]


def copy_blocks(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See `baton.kernels.block_copy.copy_blocks`."""
    known = (sources >= 0) & (targets >= 0)
    _bits(kv)[targets[known].long()] = _bits(kv)[sources[known].long()]


def _bits(values: Tensor) -> Tensor:
    """View 8-bit floating-point numbers as bytes, since torch cannot index them."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values

"""Token embeddings: rows of a table by token id, in C++ on a CPU (`native/embedding.cpp`), by torch elsewhere."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import native

__all__ = ["embedding"]


def embedding(token_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Look up rows of weight [vocab, hidden] by token_ids [T], int32 or int64, times `scale` -> [T, hidden].

    Ids must be in the vocabulary. The definition is `torch.nn.functional.embedding(token_ids, weight) * scale`, rounded
    once.
    """
    kernel = _kernel() if weight.is_cpu and _fits(token_ids, weight, scale) else None
    if kernel is None:
        rows = functional.embedding(token_ids, weight)
        return rows if scale == 1.0 else rows.mul_(scale)
    num_rows, width = weight.shape
    out = torch.empty((len(token_ids), width), dtype=weight.dtype)
    kernel(
        native.DTYPE_NUMBER.get(weight.dtype, -1),
        weight.data_ptr(),
        num_rows,
        width * weight.itemsize,
        token_ids.data_ptr(),
        int(token_ids.dtype == torch.int64),
        len(token_ids),
        scale,
        out.data_ptr(),
    )
    return out


def _fits(token_ids: Tensor, weight: Tensor, scale: float) -> bool:
    """Return whether the C++ function supports these tensors."""
    contiguous = token_ids.dim() == 1 and token_ids.is_contiguous() and weight.dim() == 2 and weight.is_contiguous()
    known = scale == 1.0 or weight.dtype in native.DTYPE_NUMBER
    return contiguous and known and token_ids.dtype in (torch.int32, torch.int64)


@functools.cache
def _kernel() -> native.NativeFunction | None:
    pointer, i64 = native.POINTER, native.I64
    table, ids = (native.INT, pointer, i64, i64), (pointer, native.INT, native.ROWS)
    return native.function("baton_embedding", *table, *ids, native.F32, pointer)

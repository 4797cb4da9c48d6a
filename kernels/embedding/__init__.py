"""Rows of a table by token id."""

from __future__ import annotations

from torch import Tensor

from . import cpu, reference

__all__ = ["embedding"]


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [vocab, hidden] by token_ids [T], int32 or int64 -> [T, hidden]. Ids are in the vocabulary."""
    if weight.is_cpu:
        return cpu.embedding(token_ids, weight)
    return reference.embedding(token_ids, weight)

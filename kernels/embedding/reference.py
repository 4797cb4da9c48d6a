"""The definition, and what serves on a GPU."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """See `baton.kernels.embedding.embedding`."""
    return functional.embedding(token_ids, weight)

"""The rows of hidden states that a layer is given. Mixtures must know: experts may serve other ranks' rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RankRows:
    """The number of rows that each data-parallel rank has in a step that all run together, in rank order."""

    tokens: tuple[int, ...]
    wanted: tuple[int, ...]  # behind the attention of the last layer


@dataclass(frozen=True)
class TokenRows:
    """The rows of hidden states [T, hidden_size] that go through a feed-forward layer."""

    slots: Tensor  # int64 [T]: where each token's KV went; -1 marks padding
    of_ranks: tuple[int, ...] | None = None  # of each data-parallel rank; None: as many as here


def rows_at(x: Tensor, wanted: Tensor) -> Tensor:
    """Return x[wanted] of x [T] or [T, N] and indices [R] int64. On a CPU it is a call that can be recorded."""
    if not x.is_cpu:
        return x[wanted]
    from baton.kernels.embedding import embedding

    return embedding(wanted, x) if x.dim() == 2 else embedding(wanted, x.unsqueeze(1)).squeeze(1)

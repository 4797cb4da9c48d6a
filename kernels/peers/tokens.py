"""What goes from rank to rank when each token is sent to the ranks that have its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ROW_VALUES = 16  # rows of hidden states begin at multiples of so many values, which lets kernels load them wide


@dataclass(frozen=True)
class PlacesOfRanks:
    """Where the experts of each rank lie: those of rank r in `of_each` places, from `first + r * apart` on."""

    first: int
    apart: int
    of_each: int

    def of(self, rank: int) -> range:
        begin = self.first + rank * self.apart
        return range(begin, begin + self.of_each)


@dataclass(frozen=True)
class Routed:
    """Tokens and the experts that they are routed to."""

    hidden: Tensor  # [T, hidden_size]
    expert_ids: Tensor  # [T, K] int32, -1 for none
    weights: Tensor  # [T, K] float32

    def padded(self, num_tokens: int) -> Routed:
        """Filled up to so many with tokens that have no expert."""
        missing = num_tokens - len(self.hidden)
        if not missing:
            return self
        hidden, weights = (functional.pad(each, (0, 0, 0, missing)) for each in (self.hidden, self.weights))
        return Routed(hidden, functional.pad(self.expert_ids, (0, 0, 0, missing), value=-1), weights)

    def through(self, collective: Callable[[Tensor], Tensor]) -> Routed:
        """The rows that the collective brings, which is given each token's routing beside it: columns of one tensor."""
        hidden, (_, top_k) = self.hidden, self.expert_ids.shape
        size = hidden.shape[1]
        columns = [hidden, *(each.contiguous().view(hidden.dtype) for each in (self.expert_ids, self.weights))]
        width = sum(each.shape[1] for each in columns)
        if filling := -width % ROW_VALUES:
            columns.append(hidden.new_zeros(len(hidden), filling))
        packed = collective(torch.cat(columns, dim=1))
        routing = packed[:, size : size + 2 * top_k * 4 // hidden.itemsize].view(torch.int32)
        return Routed(packed[:, :size], routing[:, :top_k], routing[:, top_k:].view(torch.float32))


@dataclass(frozen=True)
class Brought:
    """The tokens of all ranks, in rank order, as a rank has them that serves some: `size * T` of them.

    `visits` [2, size, T] int32 says which rows came here, of every rank, and which ranks this one's own tokens went to.
    Rows of `hidden` that did not come are not written, and mean nothing: they have no expert here.
    """

    hidden: Tensor  # [size * T, hidden_size]
    expert_ids: Tensor  # [size * T, K] int32: places on this rank; -1 for experts elsewhere
    weights: Tensor  # [size * T, K] float32
    visits: Tensor

    @classmethod
    def empty(cls, tokens: Routed, size: int) -> Brought:
        """To be filled."""
        (num_tokens, hidden_size), top_k = tokens.hidden.shape, tokens.expert_ids.shape[1]
        return cls(
            hidden=tokens.hidden.new_empty(size * num_tokens, hidden_size),
            expert_ids=tokens.expert_ids.new_empty(size * num_tokens, top_k),
            weights=tokens.weights.new_empty(size * num_tokens, top_k),
            visits=torch.empty(2, size, num_tokens, dtype=torch.int32, device=tokens.hidden.device),
        )

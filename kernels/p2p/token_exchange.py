"""Data classes of expert-parallel token exchange: tokens with their routing, and tokens that a rank received."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ROW_VALUES = 16  # rows of hidden states begin at multiples of this many values, for wide loads


@dataclass(frozen=True)
class RankSlots:
    """The places of each rank's experts: rank r has `of_each` places, from `first + r * apart` on."""

    first: int
    apart: int
    of_each: int

    def of(self, rank: int) -> range:
        begin = self.first + rank * self.apart
        return range(begin, begin + self.of_each)


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens and the experts that they are routed to."""

    hidden: Tensor  # [T, hidden_size]
    expert_ids: Tensor  # [T, K] int32, -1 for none
    weights: Tensor  # [T, K] float32

    def padded(self, num_tokens: int) -> RoutedTokens:
        """Return the tokens padded to `num_tokens` with tokens that have no expert."""
        missing = num_tokens - len(self.hidden)
        if not missing:
            return self
        hidden, weights = (functional.pad(each, (0, 0, 0, missing)) for each in (self.hidden, self.weights))
        return RoutedTokens(hidden, functional.pad(self.expert_ids, (0, 0, 0, missing), value=-1), weights)

    def through(self, collective: Callable[[Tensor], Tensor]) -> RoutedTokens:
        """Pass hidden states through a collective, with each token's routing packed as additional columns."""
        hidden, (_, top_k) = self.hidden, self.expert_ids.shape
        size = hidden.shape[1]
        columns = [hidden, *(each.contiguous().view(hidden.dtype) for each in (self.expert_ids, self.weights))]
        width = sum(each.shape[1] for each in columns)
        if filling := -width % ROW_VALUES:
            columns.append(hidden.new_zeros(len(hidden), filling))
        packed = collective(torch.cat(columns, dim=1))
        routing = packed[:, size : size + 2 * top_k * 4 // hidden.itemsize].view(torch.int32)
        return RoutedTokens(packed[:, :size], routing[:, :top_k], routing[:, top_k:].view(torch.float32))


@dataclass(frozen=True)
class DispatchedTokens:
    """The `size * T` tokens of all ranks in rank order, as one rank received them.

    `visits` [2, size, T] int32 records which rows of every rank came here, and which ranks got this rank's own tokens.
    Rows of `hidden` that did not come are undefined; they have no expert here.
    """

    hidden: Tensor  # [size * T, hidden_size]
    expert_ids: Tensor  # [size * T, K] int32: places on this rank; -1 for experts elsewhere
    weights: Tensor  # [size * T, K] float32
    visits: Tensor

    @classmethod
    def empty(cls, tokens: RoutedTokens, size: int) -> DispatchedTokens:
        """Return tensors to be filled."""
        (num_tokens, hidden_size), top_k = tokens.hidden.shape, tokens.expert_ids.shape[1]
        return cls(
            hidden=tokens.hidden.new_empty(size * num_tokens, hidden_size),
            expert_ids=tokens.expert_ids.new_empty(size * num_tokens, top_k),
            weights=tokens.weights.new_empty(size * num_tokens, top_k),
            visits=torch.empty(2, size, num_tokens, dtype=torch.int32, device=tokens.hidden.device),
        )

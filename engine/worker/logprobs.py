"""Log probabilities of sampled tokens and of prompts, where a request asked for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.logprobs import token_logprobs

from ..core.messages import TokenLogprobs

# Of float32 logits at a time: a long prompt over a large vocabulary would need gigabytes at once.
_PIECE_BYTES = 32 << 20
_PIECE_ROWS = 16  # or a multiple: every piece begins where a cache line of the whole does, as kernels like it


@dataclass(frozen=True)
class LogprobColumns:
    """The log probabilities at some positions, as a device gives them."""

    token_ids: Tensor  # [R] int64
    logprobs: Tensor  # [R] float32
    ranks: Tensor  # [R] int64
    top_ids: Tensor  # [R, k] int64
    top_logprobs: Tensor  # [R, k] float32

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobColumns:
        """Of `token_ids` `[R]` int64 and of the `num_top` most likely ones in each row of `logits` `[R, V]`."""
        return cls(token_ids, *token_logprobs(logits, token_ids, num_top))

    @classmethod
    def in_pieces(
        cls,
        hidden: Tensor,
        token_ids: Tensor,
        num_top: int,
        to_logits: Callable[[Tensor], Tensor],
        vocab_size: int,
    ) -> LogprobColumns:
        """As `of`, from hidden states `[R, hidden]`, without ever holding the logits of all of them."""
        rows = max(1, _PIECE_BYTES // (4 * vocab_size * _PIECE_ROWS)) * _PIECE_ROWS
        pieces = [
            cls.of(to_logits(piece), targets, num_top)
            for piece, targets in zip(hidden.split(rows), token_ids.split(rows), strict=True)
        ]
        return cls(*(torch.cat(columns) for columns in zip(*(piece.columns() for piece in pieces), strict=True)))

    def columns(self) -> tuple[Tensor, ...]:
        return self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def map(self, change: Callable[[Tensor], Tensor]) -> LogprobColumns:
        """The same with every column changed, as by a copy to another device."""
        return LogprobColumns(*(change(column) for column in self.columns()))

    def entries(self) -> list[TokenLogprobs]:
        """One a position: its token, then the most likely ones. Reads the columns on the CPU."""
        return [
            TokenLogprobs([token, *tops], [logprob, *top_values], rank)
            for token, logprob, rank, tops, top_values in zip(
                *(column.tolist() for column in self.columns()), strict=True
            )
        ]


def first_alternatives(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    """The token itself and its `count` most likely alternatives, for a request that asked for no more."""
    return TokenLogprobs(entry.token_ids[: count + 1], entry.logprobs[: count + 1], entry.rank)

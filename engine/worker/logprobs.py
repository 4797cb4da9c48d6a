"""Log probabilities of sampled tokens and of prompts, where a request asked for them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.kernels.logprobs import token_logprobs

from ..core.messages import TokenLogprobs

_PIECE_BYTES = (
    32 << 20
)  # of float32 logits at a time: a long prompt over a large vocabulary would need gigabytes at once


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    """One entry per row of `logits` `[R, V]` float32: its token of `[R]` int64, then the `num_top` most likely ones."""
    chosen, ranks, top_ids, top_logprobs = token_logprobs(logits, token_ids, num_top)
    columns = (token_ids, chosen, ranks, top_ids, top_logprobs)
    return [
        TokenLogprobs([token, *tops], [logprob, *top_values], rank)
        for token, logprob, rank, tops, top_values in zip(*(column.tolist() for column in columns), strict=True)
    ]


def logprobs_in_pieces(
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    num_top: int,
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> list[TokenLogprobs]:
    """As `logprobs_of`, from hidden states `[R, hidden]`, without ever holding the logits of all of them."""
    rows = max(1, _PIECE_BYTES // (4 * vocab_size))
    return [
        entry
        for piece, targets in zip(hidden.split(rows), token_ids.split(rows), strict=True)
        for entry in logprobs_of(to_logits(piece), targets, num_top)
    ]

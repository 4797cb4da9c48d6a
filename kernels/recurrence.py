"""The loop over sequences of ops with a recurrent state, where torch computes them: on a CPU and in references."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .state_batch import StateBatch


def carry_states(
    state: Tensor,
    batch: StateBatch,
    dtype: torch.dtype,
    advance: Callable[[Tensor, slice], Tensor],
    *,
    span: int | None = None,
    replay: Callable[[Tensor, int], Tensor] | None = None,
) -> None:
    """Take every sequence's state from its source through its tokens, and write it to its checkpoints and its target.

    `advance(current, tokens)` returns the state, in `dtype`, behind the tokens of a slice that begins behind `current`.
    A slice holds at most `span` tokens; None: a chunk of the batch, or all tokens of a sequence that goes token by
    token.

    `replay(current, place)` returns the state behind the draft whose inputs lie in a place, for a batch with a
    `Replay`. Decodes of such a batch go one token at a time, so that a token that was a draft changes the state by the
    same operations as any other.
    """
    num_replaying = int(batch.num_decodes) if batch.replay is not None else 0
    starts, sources, targets = batch.query_start.tolist(), batch.sources.tolist(), batch.targets.tolist()
    bounds, checkpoints, first_chunks = (
        part.tolist() for part in (batch.chunk_start, batch.checkpoints, batch.seq_chunks)
    )
    for seq, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if starts[seq] == starts[seq + 1]:
            continue
        chunks = [(starts[seq], starts[seq + 1], -1)]
        if numbers := range(*first_chunks[seq : seq + 2]):
            chunks = [(bounds[chunk], bounds[chunk + 1], checkpoints[chunk]) for chunk in numbers]
        current = initial_state(state, source, dtype)
        if seq < num_replaying:
            assert batch.replay is not None
            assert replay is not None
            for place in batch.replay.pending(seq):
                current = replay(current, place)
            for token in range(starts[seq], starts[seq + 1]):
                current = advance(current, slice(token, token + 1))
                if token == starts[seq] and target >= 0:
                    state[target] = current.to(state.dtype)
            continue
        for begin, end, checkpoint in chunks:
            for first in range(begin, end, span or end - begin):
                current = advance(current, slice(first, min(first + span, end) if span else end))
            if checkpoint >= 0:
                state[checkpoint] = current.to(state.dtype)
        if target >= 0:
            state[target] = current.to(state.dtype)


def initial_state(state: Tensor, source: int, dtype: torch.dtype) -> Tensor:
    """Return the state of a slot, zeros for slot -1."""
    return torch.zeros(state.shape[1:], dtype=dtype, device=state.device) if source < 0 else state[source].to(dtype)

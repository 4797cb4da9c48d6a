"""Guesses by draft heads: layers that read the hidden states of a step, and the tokens that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....layers.step_context import RankRows
from ...shapes import StepShape
from .. import GuessingHead, StepParts
from .base import Guesser


class _StepTokens(NamedTuple):
    """The tokens of a step [T], and its sequences [S], padding included."""

    owners: Tensor  # [T] int64: the sequence of each token
    rows: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    last: Tensor  # [S] int64: the last token of each sequence that is kept; wrong drafts may follow it


class HeadGuesser(Guesser):
    """Guesses by the model's draft head (`layers.draft_head`), from hidden states and the tokens that follow them."""

    def __init__(self, parts: StepParts, groups: Sequence[int], head: GuessingHead) -> None:
        super().__init__(parts, groups)
        self._head = head
        self._normed: Tensor | None = None  # [num_rows, hidden_size], for the step's sequences
        self._hidden: Tensor | None = None  # the same

    def read(self, shape: StepShape, hidden: Tensor, ranks: RankRows | None = None) -> None:
        """Read all tokens of a step, and write what the head keeps of them. Called when the draws are in the rows.

        `hidden` [T, ...] is the head's input. `ranks`: see `Model.forward`.
        """
        num_seqs, step = shape.num_seqs, self._tokens_of(shape)
        caches = self._parts.inputs.caches(shape, self._groups)
        states = self._head.draft(self._tokens_at(step, step.positions + 1), hidden, caches, step.last, ranks)
        if self._normed is None or self._hidden is None:
            self._normed, self._hidden = (
                torch.zeros(self._parts.limits.max_num_seqs, each.shape[1], dtype=each.dtype, device=each.device)
                for each in states
            )
        self._normed[:num_seqs].copy_(states.normed)
        self._hidden[:num_seqs].copy_(states.hidden)

    def _tokens_of(self, shape: StepShape) -> _StepTokens:
        tables, num_seqs, num_tokens = self._parts.tables, shape.num_seqs, shape.num_tokens
        batch, positions = tables.batch(num_seqs), self._parts.inputs.positions[:num_tokens]
        ends = self._numbers[: num_seqs + 1] if shape.is_decode else batch.query_start
        firsts, rows = ends[:-1], batch.rows.clamp(min=0).long()
        owners = self._owners(ends, num_tokens)
        starts = positions[firsts.clamp(max=num_tokens - 1).long()]
        last = firsts + tables.computed.tensor[0, rows] - 1 - starts
        last = torch.where(batch.rows >= 0, last, 0).clamp(0, num_tokens - 1).long()
        return _StepTokens(owners, rows[owners], positions, last)

    def _tokens_at(self, step: _StepTokens, index: Tensor) -> Tensor:
        """Return the token [T] int32 at `index` [T] in each token's row. Behind the last drawn one, it is arbitrary."""
        tokens = self._parts.tables.tokens.tensor
        return tokens[step.rows, index.clamp(max=tokens.shape[1] - 1)]

    def guess(self, num_seqs: int, num_guesses: int, ranks: RankRows | None = None) -> None:
        assert self._normed is not None, "the step was read"
        assert self._hidden is not None, "the step was read"
        head, (rows, first) = self._head, self._begin(num_seqs)
        normed, hidden = self._normed[:num_seqs], self._hidden[:num_seqs]
        for number in range(num_guesses):
            guessed = self._keep(head.logits(normed), rows, first, number)
            if number + 1 < num_guesses:
                caches = self._caches_at(rows, first - 1 + number)
                normed, hidden = head.draft(guessed, hidden, caches, ranks=ranks)


class LayersGuesser(HeadGuesser):
    """Guesses by several draft layers, each of which guesses one token. All read the model's hidden states:

        layer 0    hidden state of token i, token i + 1 ──> a guess of token i + 2
        layer 1    hidden state of token i, token i + 2 ──> a guess of token i + 3
        layer 2    ...

    A token that is not known yet is replaced by an earlier layer's guess. Keys and values computed with a wrong guess
    stay: they may make guesses worse, but change no answer. Every layer reads all tokens of the step, so `read` makes
    the guesses, in every step. It cannot store them, as the step still needs the rows' old guesses; `guess` does.
    """

    def __init__(self, parts: StepParts, groups: Sequence[int], head: GuessingHead) -> None:
        super().__init__(parts, groups, head)
        number = min(parts.limits.max_drafts, head.num_draft_layers)
        self._guessed = torch.zeros(
            parts.limits.max_num_seqs, number, dtype=torch.int32, device=parts.tables.memory.device
        )

    def read(self, shape: StepShape, hidden: Tensor, ranks: RankRows | None = None) -> None:
        tables, num_seqs, step = self._parts.tables, shape.num_seqs, self._tokens_of(shape)
        rows, first = self._first_guesses(num_seqs)
        # Index of the last known token: the one just drawn. In the middle of a prompt, all tokens of the row are known.
        known = torch.where(tables.batch(num_seqs).samples != 0, first - 1, tables.tokens.tensor.shape[1])[step.owners]
        caches = self._parts.inputs.caches(shape, self._groups)
        for number in range(self._guessed.shape[1]):
            index = step.positions + 1 + number
            tokens = self._tokens_at(step, index)
            if number:
                guessed = self._guessed[step.owners, (index - known - 1).clamp(0, number - 1).long()]
                tokens = torch.where(index > known, guessed, tokens)
            states = self._head.draft(tokens, hidden, caches, step.last, ranks, number)
            self._guessed[:num_seqs, number] = self._draw(self._head.logits(states.normed), rows, first + number)

    def guess(self, num_seqs: int, num_guesses: int, ranks: RankRows | None = None) -> None:
        rows, _ = self._begin(num_seqs)
        self._parts.tables.guesses.tensor[rows.long(), : self._guessed.shape[1]] = self._guessed[:num_seqs]

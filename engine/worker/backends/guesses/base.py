"""The part that all guessers share: draw guesses, keep them in the rows, and find the caches of their tokens."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.sampling import sample_rows

from ....core.layout import BLOCK_SIZE
from ....layers.step_context import GroupCache, RankRows, StateCache
from ...shapes import StepShape
from .. import StepParts


class Guesser(abc.ABC):
    """Stores guesses in the row tables. All that it reads and writes keeps its address."""

    def __init__(self, parts: StepParts, groups: Sequence[int]) -> None:
        """Create a guesser whose KV is in the cache groups `groups`."""
        self._parts = parts
        self._groups = groups
        most = max(parts.limits.max_num_seqs, parts.limits.max_num_batched_tokens)
        self._numbers = torch.arange(most + 1, device=parts.tables.memory.device).int()

    @abc.abstractmethod
    def guess(self, num_seqs: int, num_guesses: int, ranks: RankRows | None = None) -> None:
        """Store guesses after the last token of each of the step's sequences, padding included. Called after `read`.

        Keys and values of guessed tokens are written if their row has a block for them. The next step overwrites them.
        `ranks`: see `Model.forward`.
        """

    def _owners(self, query_start: Tensor, num_tokens: int) -> Tensor:
        """Return the sequence [T] of each token, by `query_start` [S + 1]; tokens behind the last sequence get that."""
        tokens = self._numbers[:num_tokens]
        return torch.searchsorted(query_start[1:].contiguous(), tokens, right=True).clamp(max=len(query_start) - 2)

    def _first_guesses(self, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Return the row [S] of each sequence, -1 for padding, and the position [S] of its first guess."""
        rows = self._parts.tables.rows.tensor[0, :num_seqs]
        return rows, self._parts.tables.computed.tensor[0, rows.clamp(min=0).long()] + 1

    def _begin(self, num_seqs: int) -> tuple[Tensor, Tensor]:
        """Return the same as `_first_guesses`, and store in the tables that guesses begin there."""
        rows, first = self._first_guesses(num_seqs)
        self._parts.tables.first_guess.tensor[0, rows.long()] = first  # row -1 is the table's last line, a spare one
        return rows, first

    def _draw(self, logits: Tensor, rows: Tensor, position: Tensor) -> Tensor:
        """Draw a guess of each row at a position [S] from logits [S, V]. Returns them [S] int32."""
        drawn = sample_rows(logits, self._parts.tables.sampling.tensor, rows, position)
        return drawn.clamp(min=0).int()  # if no token can be drawn, any guess is wrong

    def _keep(self, logits: Tensor, rows: Tensor, first: Tensor, number: int) -> Tensor:
        """Draw guess `number` of each row from logits [S, V], store it, and return it [S] int32."""
        guessed = self._draw(logits, rows, first + number)
        self._parts.tables.guesses.tensor[rows.long(), number] = guessed
        return guessed

    def _caches_at(self, rows: Tensor, positions: Tensor) -> tuple[GroupCache | StateCache, ...]:
        """Return the caches of a step with one token for each row, or with none for a row that has no block for it."""
        num_seqs, some_rows = len(rows), rows.clamp(min=0).long()
        has_block = self._has_block(rows, positions)
        positions = torch.where(has_block, positions, 0).long()
        seq_lens = torch.where(has_block, positions + 1, 0)
        placed = Placed(some_rows, self._numbers[: num_seqs + 1], seq_lens, some_rows, positions, has_block)
        return self._caches_of(placed, num_decodes=num_seqs, longest=1)

    def _has_block(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return for each row [S] whether it has a block for the token at its position [S]."""
        capacity = self._parts.tables.capacity.tensor[0, rows.clamp(min=0).long()]
        return (rows >= 0) & (positions < capacity.clamp(max=self._parts.limits.max_model_len))

    def _caches_of(self, placed: Placed, num_decodes: int, longest: int) -> tuple[GroupCache | StateCache, ...]:
        """Return the caches of a step in which no sequence has more than `longest` tokens."""
        tables, limits = self._parts.tables, self._parts.limits
        num_seqs, num_tokens = len(placed.rows), len(placed.positions)

        def batch(shape: StepShape, group: int) -> AttentionBatch:
            blocks = tables.blocks[group, placed.token_rows, placed.positions // BLOCK_SIZE].long()
            slots = torch.where(placed.is_real, blocks * BLOCK_SIZE + placed.positions % BLOCK_SIZE, -1)
            return AttentionBatch(
                query_start=placed.query_start,
                seq_lens=placed.seq_lens.int(),
                block_tables=tables.blocks[group],
                positions=placed.positions,
                slots=slots,
                max_query_len=longest,
                max_seq_len=limits.max_model_len,
                num_decodes=num_decodes,
                table_rows=placed.rows.int(),
            )

        shape = StepShape(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            max_query_len=longest,
            max_seq_len=limits.max_model_len,
        )
        return self._parts.inputs.caches(shape, self._groups, batch)


class Placed(NamedTuple):
    """The tokens [T] and sequences [S] of a step, as tensors."""

    rows: Tensor  # [S] int64
    query_start: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S]
    token_rows: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    is_real: Tensor  # [T]: False for padding, and for tokens without a block

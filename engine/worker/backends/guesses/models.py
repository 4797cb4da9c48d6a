"""Guesses by a draft model, and which tokens it reads when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....layers.step_context import RankRows
from ...batch import Batch
from ...shapes import StepShape
from .. import Model, StepParts
from .base import Guesser, Placed


class ReadSize(NamedTuple):
    """The tokens that a draft model reads after a step, and the most of one sequence."""

    num_seqs: int
    num_tokens: int
    longest: int

    @classmethod
    def of(cls, shape: StepShape) -> ReadSize:
        """Return the size of a read after a step of this shape, if all tokens before it have been read."""
        return cls(shape.num_seqs, shape.num_tokens, shape.max_query_len)


class ModelGuesser(Guesser):
    """Guesses by a draft model, which reads the tokens, and nothing from the model.

    After a step, it reads those tokens of the step's sequences that it has not read yet, but only

    * before it guesses: then the token drawn last as well, which gives the first guess;
    * of prompts, since their blocks may be handed over or be prefix hits;
    * if the plan names the sequences that are read (`StepPlan.reads_from`). Guesses of others are arbitrary.

    The device knows how many tokens of each row are read (`RowTables.read`); the host, which does not wait for it,
    knows how many may be unread (`RowTables.unread`). Each data-parallel rank has a whole draft model, and does not
    wait for other ranks in it.
    """

    def __init__(self, parts: StepParts, groups: Sequence[int], model: Model) -> None:
        super().__init__(parts, groups)
        self._model = model
        # What `read` reads: sequences from this number on, and of each this many of the tokens drawn last (0 or 1).
        self._first, self._num_last = torch.zeros(2, dtype=torch.int32, device=parts.tables.memory.device)
        self._set = (0, 0)  # their values

    def own_guesses(self, num_guesses: int) -> int:
        """Return how many guesses this rank makes where the data-parallel ranks make `num_guesses`.

        It makes none for others, as they do not wait for it, so that it need not read for them.
        """
        current = self._parts.current
        return current.num_guesses if current.batch.rows else num_guesses

    def due(self, batch: Batch, num_guesses: int) -> ReadSize | None:
        """Return the most that must be read after a step, and count it as read; None if nothing. Call it every step."""
        tables, limits = self._parts.tables, self._parts.limits
        for row, length in zip(batch.rows, batch.lens, strict=True):
            tables.unread[row] += length
        first, num_last = self._first_due(batch, num_guesses), min(1, num_guesses)
        lens = []
        for row, end in zip(batch.rows[first:], batch.ends[first:], strict=True):
            lens.append(tables.unread[row] + num_last)
            has_block = end < min(tables.capacity_of(row), limits.max_model_len)
            tables.unread[row] = -num_last if has_block else 0
        if self._set != (first, num_last):
            self._first.fill_(first)
            self._num_last.fill_(num_last)
            self._set = (first, num_last)
        return ReadSize(len(batch.rows), sum(lens), min(max(lens), limits.max_model_len)) if sum(lens) else None

    def _first_due(self, batch: Batch, num_guesses: int) -> int:
        """Return the first of the sequences that must be read; those of prompts are the last ones of a step."""
        tables, rows, reads_from = self._parts.tables, batch.rows, self._parts.current.reads_from
        if num_guesses:
            return reads_from or 0
        reading = (i for i, start in enumerate(batch.starts) if start < tables.num_known[rows[i]])
        first_prompt = next(reading, len(rows))
        return first_prompt if reads_from is None else min(first_prompt, reads_from)

    def read_exactly(self, num_seqs: int) -> None:
        """Read all due tokens of the step's sequences, on a device that may be waited for."""
        _, lens = self._due(self._parts.tables.rows.tensor[0, :num_seqs])
        self.read_all(ReadSize(num_seqs, int(lens.sum()), int(lens.max())))

    def read_all(self, size: ReadSize) -> None:
        """Read that many due tokens, as many at a time as a step may have."""
        most = self._parts.limits.max_num_batched_tokens
        for first in range(0, size.num_tokens, most):
            self.read(size._replace(num_tokens=min(size.num_tokens - first, most)))

    def read(self, size: ReadSize) -> None:
        """Read due tokens of the step's sequences, in order, and make first guesses.

        A guess is of use if the token drawn last was read before it.
        """
        num_seqs, num_tokens, longest = size
        tables, (rows, first) = self._parts.tables, self._begin(num_seqs)
        starts, lens = self._due(rows)
        some_rows = rows.clamp(min=0).long()
        if longest == 1:
            token_ids = tables.tokens.tensor[some_rows, starts.clamp(max=self._parts.limits.max_model_len - 1).long()]
            caches = self._caches_at(torch.where(lens > 0, rows, -1), starts)
            hidden = self._model.forward(token_ids, caches, None)
        else:
            query_start = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).clamp(max=num_tokens).int()
            lens = query_start.diff()
            tokens, owners = self._numbers[:num_tokens], self._owners(query_start, num_tokens)
            is_real = tokens < query_start[-1]
            positions = torch.where(is_real, starts[owners] + tokens - query_start[owners], 0).long()
            token_ids = tables.tokens.tensor[some_rows[owners], positions]
            placed = Placed(some_rows, query_start, starts + lens, some_rows[owners], positions, is_real)
            caches, last = self._caches_of(placed, num_decodes=0, longest=longest), query_start[1:] - 1
            hidden = self._model.forward(token_ids, caches, last.clamp(min=0).long())
        guessed = self._draw(self._model.logits(hidden), rows, first)
        guesses = tables.guesses.tensor
        guesses[rows.long(), 0] = torch.where(lens > 0, guessed, guesses[rows.long(), 0])
        tables.read.tensor[0, rows.long()] = starts + lens

    def _due(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each row [S] the number of tokens read, and how many more must be."""
        tables, numbers = self._parts.tables, self._numbers[: len(rows)]
        computed, read = (table.tensor[0, rows.long()] for table in (tables.computed, tables.read))
        ends = computed + self._num_last * self._has_block(rows, computed)
        is_due = (rows >= 0) & (numbers >= self._first)
        return read, torch.where(is_due, ends - read, 0).clamp(min=0)

    def guess(self, num_seqs: int, num_guesses: int, ranks: RankRows | None = None) -> None:
        rows, first = self._first_guesses(num_seqs)
        token_ids = self._parts.tables.guesses.tensor[rows.long(), 0]
        for number in range(1, num_guesses):
            caches = self._caches_at(rows, first - 1 + number)
            normed = self._model.forward(token_ids, caches, None)
            token_ids = self._keep(self._model.logits(normed), rows, first, number)

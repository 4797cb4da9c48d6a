"""Guesses of a model's draft head (`layers.draft_head`), made on the device at the end of each step.

    read     all tokens       hidden states of the step, each with the token that follows it in its row ─> head's KV
    guess    the last drawn   its state ─> logits ─> a guess ─> draft head ─> logits ─> the next guess ...

A guess is drawn as the token itself will be, with the request's temperature and the random numbers of that position:
where the draft head's logits are near the model's, so is the draw. Penalties, biases and grammars are left out.

Nothing here waits for the device, and no shape depends on what the tables hold: a captured step has both parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.sampling import sample_rows
from baton.kernels.step import Guesses

from ...core.layout import BLOCK_SIZE
from ...layers.attention import GroupCache, StateCache
from ..shapes import StepShape
from . import StepParts


class DraftingHead:
    """Runs the draft head. What it reads and writes stays at its addresses.

    `guesses` are those of each row, from the index `guesses.first` in the row on; the last line of both is of padding.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        limits, device = parts.limits, parts.tables.memory.device
        num_rows = limits.max_num_seqs
        self.guesses = Guesses(
            torch.zeros(num_rows + 1, limits.max_drafts, dtype=torch.int32, device=device),
            torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
        )
        self._numbers = torch.arange(max(num_rows, limits.max_num_batched_tokens) + 1, device=device).int()
        self._normed: Tensor | None = None  # [num_rows, hidden_size] of the step's sequences, as is the next
        self._hidden: Tensor | None = None

    def read(self, shape: StepShape, hidden: Tensor) -> None:
        """Write the head's KV of all tokens of a step, whose `hidden` states are [T, hidden_size].

        Called when its draws are in the rows.
        """
        tables, inputs, model = self._parts.tables, self._parts.inputs, self._parts.model
        num_seqs, num_tokens = shape.num_seqs, shape.num_tokens
        batch, positions = tables.batch(num_seqs), inputs.positions[:num_tokens]
        ends = self._numbers[: num_seqs + 1] if shape.is_decode else batch.query_start
        firsts, rows = ends[:-1], batch.rows.clamp(min=0).long()
        owners = torch.searchsorted(ends[1:].contiguous(), self._numbers[:num_tokens], right=True)
        owners = owners.clamp(max=num_seqs - 1)
        longest = tables.tokens.tensor.shape[1] - 1
        following = tables.tokens.tensor[rows[owners], (positions + 1).clamp(max=longest)]
        # The last token of each sequence that is kept: behind it lie drafts that were wrong.
        starts = positions[firsts.clamp(max=num_tokens - 1).long()]
        last = firsts + tables.computed.tensor[0, rows] - 1 - starts
        last = torch.where(batch.rows >= 0, last, 0).clamp(0, num_tokens - 1).long()
        states = model.draft(following, hidden, inputs.of(shape).caches, last)
        if self._normed is None or self._hidden is None:
            self._normed, self._hidden = (
                torch.zeros(self._parts.limits.max_num_seqs, each.shape[1], dtype=each.dtype, device=each.device)
                for each in states
            )
        self._normed[:num_seqs].copy_(states.normed)
        self._hidden[:num_seqs].copy_(states.hidden)

    def guess(self, num_seqs: int, num_guesses: int) -> None:
        """Store guesses behind the last token of each of the step's sequences, padding included. Called after `read`.

        Keys and values of guessed tokens are written where their row has a block for them; the next step writes over
        them.
        """
        assert self._normed is not None, "the step was read"
        assert self._hidden is not None, "the step was read"
        tables, model, batch = self._parts.tables, self._parts.model, self._parts.tables.batch(num_seqs)
        rows = batch.rows.long()  # -1 is padding, and the last line of `guesses`
        first = tables.computed.tensor[0, rows.clamp(min=0)] + 1
        self.guesses.first[rows] = first
        normed, hidden = self._normed[:num_seqs], self._hidden[:num_seqs]
        for number in range(num_guesses):
            drawn = sample_rows(model.logits(normed), tables.sampling.tensor, batch.rows, first + number)
            guessed = drawn.clamp(min=0).int()  # where nothing can be drawn, the guess is wrong
            self.guesses.token_ids[rows, number] = guessed
            if number + 1 < num_guesses:
                normed, hidden = model.draft(guessed, hidden, self._caches_at(batch.rows, first - 1 + number))

    def _caches_at(self, rows: Tensor, positions: Tensor) -> tuple[GroupCache | StateCache, ...]:
        """Return the caches of a step of one token of each row; of a row that has no block for it, of none."""
        tables, limits = self._parts.tables, self._parts.limits
        num_seqs, some_rows = len(rows), rows.clamp(min=0).long()
        has_block = (rows >= 0) & (positions < tables.room.tensor[0, some_rows].clamp(max=limits.max_model_len))
        positions = torch.where(has_block, positions, 0).long()
        blocks = tables.blocks[:, some_rows, positions // BLOCK_SIZE].long()
        slots = torch.where(has_block, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, -1)
        seq_lens = torch.where(has_block, positions + 1, 0).int()

        def batch(group: int) -> AttentionBatch:
            return AttentionBatch(
                query_start=self._numbers[: num_seqs + 1],
                seq_lens=seq_lens,
                block_tables=tables.blocks[group],
                positions=positions,
                slots=slots[group],
                max_query_len=1,
                max_seq_len=limits.max_model_len,
                num_decodes=num_seqs,
                table_rows=some_rows.int(),
            )

        shape = StepShape(num_seqs, num_seqs, num_seqs, 1, limits.max_model_len)
        return self._parts.inputs.caches(shape, batch)

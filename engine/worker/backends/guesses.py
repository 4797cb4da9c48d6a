"""Guesses made on the device at the end of each step, by the model's draft head or by a draft model.

    read     all tokens of the step ─> KV or states that the drafter keeps of them
    guess    the token drawn last   ─> logits ─> a guess ─> drafter ─> logits ─> the next guess ...

A guess is drawn like the token itself, with the request's temperature and the random numbers of that position. So where
the drafter's logits are close to the model's, the draws are equal. Penalties, biases and grammars are left out.

Nothing here waits for the device, and no shape depends on values in the tables, so a captured step has both parts.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.sampling import sample_rows

from ...core.layout import BLOCK_SIZE
from ...layers.attention import GroupCache, StateCache
from ...layers.base import RankRows
from ..shapes import StepShape
from . import DraftModel, GuessingHead, Model, StepParts


def make_guesser(parts: StepParts) -> Guesser | None:
    """Return the guesser of a runner; None if nothing guesses on the device."""
    if not parts.limits.guesses_on_device:
        return None
    groups, model, head = parts.draft_model or DraftModel(parts.inputs.arenas.model_groups, head=parts.model)
    if head is not None:
        return (HeadGuesser if head.num_draft_layers == 1 else LayersGuesser)(parts, groups, head)
    assert model is not None, "a draft model is a model or a head"
    return ModelGuesser(parts, groups, model)


class Guesser(abc.ABC):
    """Stores guesses in the row tables. All that it reads and writes keeps its address."""

    reads_hidden: bool  # `read` needs the hidden states of all tokens

    def __init__(self, parts: StepParts, groups: Sequence[int]) -> None:
        """Create a guesser whose KV is in the cache groups `groups`."""
        self._parts = parts
        self._groups = groups
        most = max(parts.limits.max_num_seqs, parts.limits.max_num_batched_tokens)
        self._numbers = torch.arange(most + 1, device=parts.tables.memory.device).int()

    @abc.abstractmethod
    def read(self, shape: StepShape, hidden: Tensor | None, ranks: RankRows | None = None) -> None:
        """Read all tokens of a step, and write what the drafter keeps of them. Called when the draws are in the rows.

        `hidden` [T, ...] is a draft head's input, if `reads_hidden`. `ranks`: see `Model.forward`.
        """

    def read_late(self, shape: StepShape, hidden: Tensor | None, ranks: RankRows | None, *, is_needed: bool) -> None:
        """Do as `read`, on a device that may be waited for. It may be put off to a later step if it is not needed."""
        self.read(shape, hidden, ranks)

    @abc.abstractmethod
    def drawn_again(self, rows: Tensor) -> None:
        """Note that rows [J] int64 now keep other tokens than those that `read` found there."""

    @abc.abstractmethod
    def guess(self, num_seqs: int, num_guesses: int, ranks: RankRows | None = None) -> None:
        """Store guesses after the last token of each of the step's sequences, padding included. Called after `read`.

        Keys and values of guessed tokens are written if their row has a block for them. The next step overwrites them.
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
        tables, limits = self._parts.tables, self._parts.limits
        num_seqs, some_rows = len(rows), rows.clamp(min=0).long()
        has_block = (rows >= 0) & (positions < tables.capacity.tensor[0, some_rows].clamp(max=limits.max_model_len))
        positions = torch.where(has_block, positions, 0).long()
        seq_lens = torch.where(has_block, positions + 1, 0)
        placed = _Placed(some_rows, self._numbers[: num_seqs + 1], seq_lens, some_rows, positions, has_block)
        return self._caches_of(placed, num_decodes=num_seqs)

    def _caches_of(self, placed: _Placed, num_decodes: int) -> tuple[GroupCache | StateCache, ...]:
        tables, limits = self._parts.tables, self._parts.limits
        num_seqs, num_tokens = len(placed.rows), len(placed.positions)
        longest = 1 if num_decodes else min(num_tokens, limits.max_model_len)

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


class _Placed(NamedTuple):
    """The tokens [T] and sequences [S] of a step, as tensors."""

    rows: Tensor  # [S] int64
    query_start: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S]
    token_rows: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    is_real: Tensor  # [T]: False for padding, and for tokens without a block


class _StepTokens(NamedTuple):
    """The tokens of a step [T], and its sequences [S], padding included."""

    owners: Tensor  # [T] int64: the sequence of each token
    rows: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    last: Tensor  # [S] int64: the last token of each sequence that is kept; wrong drafts may follow it


class HeadGuesser(Guesser):
    """Guesses by the model's draft head (`layers.draft_head`), from hidden states and the tokens that follow them."""

    reads_hidden = True

    def __init__(self, parts: StepParts, groups: Sequence[int], head: GuessingHead) -> None:
        super().__init__(parts, groups)
        self._head = head
        self._normed: Tensor | None = None  # [num_rows, hidden_size], for the step's sequences
        self._hidden: Tensor | None = None  # the same

    def read(self, shape: StepShape, hidden: Tensor | None, ranks: RankRows | None = None) -> None:
        assert hidden is not None, "it was asked for"
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

    def drawn_again(self, rows: Tensor) -> None:
        """Do nothing: no state here depends on which tokens were kept. The next guess may be a worse one."""

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

    def read(self, shape: StepShape, hidden: Tensor | None, ranks: RankRows | None = None) -> None:
        assert hidden is not None, "it was asked for"
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


class ModelGuesser(Guesser):
    """Guesses by a draft model, which reads the tokens, and nothing from the model.

    The device knows how many tokens of each row it has read (`RowTables.read`), so it may skip steps: the next one read
    makes up for them. Each data-parallel rank has a whole draft model, and does not wait for other ranks in it.
    """

    reads_hidden = False

    def __init__(self, parts: StepParts, groups: Sequence[int], model: Model) -> None:
        super().__init__(parts, groups)
        self._model = model

    def read(self, shape: StepShape, hidden: Tensor | None, ranks: RankRows | None = None) -> None:
        """Read the tokens of the step that are kept. The step before has been read, too."""
        self._read(self._parts.tables.rows.tensor[0, : shape.num_seqs], shape.num_tokens)

    def read_late(self, shape: StepShape, hidden: Tensor | None, ranks: RankRows | None, *, is_needed: bool) -> None:
        """If needed, read all tokens of the step's sequences that have not been read yet."""
        if not is_needed:
            return
        tables, most = self._parts.tables, self._parts.limits.max_num_batched_tokens
        rows = tables.rows.tensor[0, : shape.num_seqs]
        real = rows[rows >= 0].long()  # a rank with nothing to do runs padding
        while num_unread := int((tables.computed.tensor[0, real] - tables.read.tensor[0, real]).sum()):
            self._read(rows, min(num_unread, most))

    def _read(self, rows: Tensor, num_tokens: int) -> None:
        """Read up to `num_tokens` unread tokens of rows [S], in the order of the rows."""
        tables, some_rows = self._parts.tables, rows.clamp(min=0).long()
        starts = tables.read.tensor[0, some_rows]
        lens = torch.where(rows >= 0, tables.computed.tensor[0, some_rows] - starts, 0)
        query_start = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).clamp(max=num_tokens).int()
        lens = query_start.diff()
        tokens, owners = self._numbers[:num_tokens], self._owners(query_start, num_tokens)
        is_real = tokens < query_start[-1]
        positions = torch.where(is_real, starts[owners] + tokens - query_start[owners], 0).long()
        token_ids = tables.tokens.tensor[some_rows[owners], positions]
        placed = _Placed(some_rows, query_start, starts + lens, some_rows[owners], positions, is_real)
        # One token is wanted after the last attention: tensor-parallel ranks wait for each other in its product.
        self._model.forward(token_ids, self._caches_of(placed, num_decodes=0), self._numbers[:1].long())
        tables.read.tensor[0, some_rows] = torch.where(rows >= 0, starts + lens, tables.read.tensor[0, some_rows])

    def drawn_again(self, rows: Tensor) -> None:
        """Lower the number of tokens read to that of tokens computed: drafts that were read before are kept."""
        tables = self._parts.tables
        tables.read.tensor[0, rows] = torch.minimum(tables.read.tensor[0, rows], tables.computed.tensor[0, rows])

    def guess(self, num_seqs: int, num_guesses: int, ranks: RankRows | None = None) -> None:
        rows, first = self._begin(num_seqs)
        last = (first - 1).clamp(max=self._parts.limits.max_model_len - 1)
        token_ids = self._parts.tables.tokens.tensor[rows.clamp(min=0).long(), last.long()]
        for number in range(num_guesses):
            caches = self._caches_at(rows, first - 1 + number)
            normed = self._model.forward(token_ids, caches, None)
            token_ids = self._keep(self._model.logits(normed), rows, first, number)

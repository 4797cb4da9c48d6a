"""The inputs of one step, described once for all devices; each backend fills the tensors in its own way.

    plan.chunks ─> Batch          columns of numbers, on the CPU (`batch`)
                ─> StepShape      the size that the step is padded to
                ─> StepInputs     tensors at fixed addresses, filled from the row tables

Tensors keep their addresses as long as the runner lives, so that captured steps find them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.state_batch import Cuts, Replay, StateBatch, StateCheckpoint, most_chunks
from baton.kernels.step import DrawPlaces, decode_states, replay_states

from ..core.layout import NOT_KEPT, draft_places
from ..layers.step_context import GroupCache, StateCache
from .batch import Batch
from .shapes import StepLimits, StepShape
from .tables import CacheArenas, RowTables


@dataclass(frozen=True)
class StepInputs:
    """The tensors that the model reads in a step of one shape, padding included."""

    token_ids: Tensor  # [num_tokens] int32
    caches: tuple[GroupCache | StateCache, ...]  # one for each cache group
    wanted: Tensor | None  # [num_wanted] int64: tokens that go through the whole last layer; None: all


class StateInputs:
    """The slots from which a step's sequences read their states, and to which they write them, in one cache group.

        source   slot of the last token before the step       entry (start - 1) // checkpoint_tokens of the row
        target   slot of the last token of the step           entry (end - 1) // checkpoint_tokens
        cuts     the ends of other entries within the step    their slots, if checkpoints are kept there

    For a step of chunks the CPU computes these, for one of decodes the device; both at fixed addresses.

    With drafts, the device finds the slots of decodes in every step, because only the device knows which tokens have
    been applied to a row's state, and which were accepted after them.
    """

    def __init__(self, tables: RowTables, group: int, limits: StepLimits, checkpoint_tokens: int) -> None:
        max_num_seqs = limits.max_num_seqs
        self._group = group
        self._entry_tokens = checkpoint_tokens
        self._tables = tables
        self._own = tables.states[group]
        device = tables.memory.device
        self._one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._all = torch.full((1,), max_num_seqs, dtype=torch.int32, device=device)
        self._none = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._num_places = draft_places(limits.max_drafts)
        self._replays = torch.zeros(3, max_num_seqs, dtype=torch.int32, device=device)

    def set(self, batch: Batch, shape: StepShape) -> None:
        """Write the slots and cuts of a step of chunks, which is padded to `shape`."""
        if shape.is_decode:
            return
        slots = self._tables.state_slots[self._group]
        sources, targets, checkpoints = [], [], []
        for seq, (row, start, end) in enumerate(zip(batch.rows, batch.starts, batch.ends, strict=True)):
            table = slots[row]
            sources.append(table[(start - 1) // self._entry_tokens] if start else NOT_KEPT)
            targets.append(table[(end - 1) // self._entry_tokens])
            if seq >= batch.num_decoding:
                checkpoints += self._checkpoints(table, seq, start, end)
        cuts = Cuts.of(batch.lens, sources, checkpoints=checkpoints, num_decodes=batch.num_decoding)
        more = [NOT_KEPT] * (shape.num_seqs - len(sources))
        padded = cuts.padded(shape.num_seqs, self._num_chunks(shape))
        self._tables.set_states(self._group, sources + more, targets + more, padded)

    def fill(self, shape: StepShape) -> None:
        """Have the device look up the slots of decodes in the tables, and the tokens to replay."""
        tables, rows = self._tables, self._tables.rows.tensor[0, : shape.num_seqs]
        table, states = tables.blocks[self._group], self.of(shape)
        if states.replay is not None:
            applied = tables.applied[self._group]
            replay_states(table, tables.step.computed, applied, rows, states, self._entry_tokens)
        elif shape.is_decode:
            batch = tables.batch(shape.num_seqs)
            decode_states(table, tables.step.computed, batch, self._entry_tokens, states.sources, states.targets)

    def of(self, shape: StepShape) -> StateBatch:
        """Return the state batch of a step of this shape, which `set` and `fill` fill."""
        seqs = shape.num_seqs
        sources, targets = self._own.sources.tensor[0, :seqs], self._own.targets.tensor[0, :seqs]
        replay = None
        if self._num_places:
            rows, starts, counts = self._replays[:, :seqs].unbind()
            replay = Replay(rows, starts, counts, self._num_places)
        if shape.is_decode or shape.is_drafted:
            one_each, query_start = self._one_each, self._tables.query_start.tensor[0]
            return StateBatch(
                query_start=(one_each if shape.is_decode else query_start)[: seqs + 1],
                sources=sources,
                targets=targets,
                num_decodes=self._all,
                chunk_start=self._none[:1],
                chunk_seqs=self._none[:0],
                checkpoints=self._none[:0],
                seq_chunks=self._none[: seqs + 1],
                least_decodes=seqs,
                most_decodes=seqs,
                replay=replay,
            )
        chunks = self._num_chunks(shape)
        return StateBatch(
            query_start=self._tables.query_start.tensor[0, : seqs + 1],
            sources=sources,
            targets=targets,
            num_decodes=self._own.num_decodes.tensor[0],
            chunk_start=self._own.chunk_start.tensor[0, : chunks + 1],
            chunk_seqs=self._own.chunk_seqs.tensor[0, :chunks],
            checkpoints=self._own.checkpoints.tensor[0, :chunks],
            seq_chunks=self._own.seq_chunks.tensor[0, : seqs + 1],
            least_decodes=shape.num_decodes,
            # A captured mixed step has any number of decodes; decodes with drafts follow those of one token.
            most_decodes=seqs if shape.max_drafts else shape.num_decodes or seqs,
            replay=replay,
        )

    def _num_chunks(self, shape: StepShape) -> int:
        if shape.is_drafted:
            return 0
        decodes = shape.num_decodes
        return most_chunks(shape.num_seqs - decodes, shape.num_tokens - decodes, self._entry_tokens)

    def _checkpoints(self, table: Sequence[int], seq: int, start: int, end: int) -> list[StateCheckpoint]:
        """Return the checkpoints to keep within tokens `start` to `end` of a sequence.

        An entry whose slot has moved to a later entry (`core.kv.cache_groups`) still names that slot.
        """
        size = self._entry_tokens
        cuts = range((start // size + 1) * size, end, size)
        slots = ((cut, table[cut // size - 1]) for cut in cuts)
        unkept = (NOT_KEPT, table[(end - 1) // size])
        return [StateCheckpoint(seq, cut - start, slot) for cut, slot in slots if slot not in unkept]


class InputBuffers:
    """Memory for the inputs of the largest step; each step uses the front of it."""

    def __init__(self, tables: RowTables, arenas: CacheArenas, limits: StepLimits) -> None:
        self.arenas = arenas
        self._tables = tables
        self.states = {
            group: StateInputs(tables, group, limits, arenas.checkpoint_tokens) for group in arenas.state_groups
        }
        max_num_seqs, max_num_tokens = limits.max_num_seqs, limits.max_num_batched_tokens

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=tables.memory.device)

        self.token_ids = zeros(max_num_tokens, dtype=torch.int32)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.slots = zeros(len(arenas.tensors), max_num_tokens, dtype=torch.int64)
        self.wanted = zeros(max_num_tokens, dtype=torch.int64)
        self.seq_lens = zeros(max_num_seqs, dtype=torch.int32)
        self.table_rows = zeros(max_num_seqs, dtype=torch.int32)
        self._one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=tables.memory.device)
        draws = limits.max_num_draws if limits.max_drafts else 0
        self._places = DrawPlaces(
            zeros(draws, dtype=torch.int32), zeros(draws, dtype=torch.int32), zeros(draws, dtype=torch.int64)
        )

    def places(self, num_draws: int) -> DrawPlaces:
        """Return the places for the draws of a step with drafts, which the device fills."""
        places = self._places
        return DrawPlaces(places.rows[:num_draws], places.positions[:num_draws], places.tokens[:num_draws])

    def set(self, batch: Batch, shape: StepShape) -> None:
        """Write what only the CPU knows of a step, beside the batch: how chunks of states are cut, and guesses."""
        for states in self.states.values():
            states.set(batch, shape)
        for guesses in batch.guesses:
            if guesses.token_ids:  # else the row has them
                self._tables.guess(batch.rows[guesses.chunk], guesses.first, guesses.token_ids)

    def fill_states(self, shape: StepShape) -> None:
        """Have the device look up the slots of states of decodes. Call it after the step's other inputs are filled."""
        for states in self.states.values():
            states.fill(shape)

    def of(self, shape: StepShape) -> StepInputs:
        """Return the model's inputs in a step of this shape. They are not valid until the backend has filled them."""
        wanted = None if shape.num_wanted is None else self.wanted[: shape.num_wanted]
        return StepInputs(self.token_ids[: shape.num_tokens], self.caches(shape, self.arenas.model_groups), wanted)

    def caches(
        self,
        shape: StepShape,
        groups: Sequence[int],
        batch_of: Callable[[StepShape, int], AttentionBatch] | None = None,
    ) -> tuple[GroupCache | StateCache, ...]:
        """Return the caches of some groups: as in the step of `shape`, or, except for states, as `batch_of` says."""
        batch_of, tensors = batch_of or self._batch, self.arenas.tensors
        return tuple(
            StateCache(self.states[group].of(shape), tensors[group], self.arenas.draft_inputs.get(group))
            if group in self.states
            else GroupCache(batch_of(shape, group), tensors[group])
            for group in groups
        )

    def _batch(self, shape: StepShape, group: int) -> AttentionBatch:
        """Return the sequences of a step, with the block table and slots of one cache group."""
        seqs, tokens = shape.num_seqs, shape.num_tokens
        query_start = self._one_each if shape.is_decode else self._tables.query_start.tensor[0]
        return AttentionBatch(
            query_start=query_start[: seqs + 1],
            seq_lens=self.seq_lens[:seqs],
            block_tables=self._tables.blocks[group],
            positions=self.positions[:tokens],
            slots=self.slots[group, :tokens],
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
            num_decodes=shape.num_decodes,
            table_rows=self.table_rows[:seqs],
            num_kv_tokens=shape.num_kv_tokens,
            drafted=shape.is_drafted,
        )

"""The inputs of one step, described once for all devices; each backend fills the tensors in its way.

    plan.chunks ─> Batch          columns of numbers, on the CPU
                ─> StepShape      the size that the step is padded to
                ─> StepInputs     tensors at fixed addresses, filled from the row tables

Tensors stay at their addresses for the life of a runner, so that a captured step finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.state_batch import Checkpoint, Cuts, Replay, StateBatch, most_chunks
from baton.kernels.step import DrawPlaces, decode_states, replay_states

from ..core.layout import NOT_KEPT, draft_places
from ..core.step import PADDING, Chunk, StepSize
from ..layers.attention import GroupCache, StateCache
from .shapes import StepLimits, StepShape
from .tables import RowTables, TableWrites


class Guesses(NamedTuple):
    """Guesses of the tokens of one chunk's row, of which some are the chunk's drafts."""

    chunk: int
    first: int  # the index in the row of the first
    token_ids: Sequence[int]  # (): those that the row keeps
    num_drafts: int


class Draws(NamedTuple):
    """The tokens that a step draws, one entry each."""

    chunks: list[int]
    entries: list[int]  # in a page of the outputs, where each chunk has one for each draw, and one if it has none
    rows: list[int]
    positions: list[int]  # tokens of the row that precede it

    def pick(self, numbers: Sequence[int]) -> Draws:
        """Return some of them."""
        return Draws(*([column[number] for number in numbers] for column in self))


@dataclass(frozen=True)
class Batch:
    """The chunks of one step as columns, one entry a chunk."""

    rows: list[int]
    starts: list[int]  # tokens of the row whose KV exists before the step; the most it may be where that is not known
    lens: list[int]  # tokens of the row that the step runs
    ends: list[int]  # `starts` + `lens`
    samples: list[bool]  # a token is drawn behind the chunk, and behind the token before each draft
    scored: list[int]  # indices of the chunks whose tokens get prompt logprobs
    guesses: list[Guesses]  # of the chunks that end in drafts

    @classmethod
    def of(cls, chunks: Sequence[Chunk], starts: list[int] | None = None) -> Batch:
        """Make the batch of a plan. `starts`, if they are known better than the plan knew them."""
        starts = [chunk.start for chunk in chunks] if starts is None else starts
        lens = [chunk.num_tokens for chunk in chunks]
        return cls(
            rows=[chunk.row for chunk in chunks],
            starts=starts,
            lens=lens,
            ends=[start + length for start, length in zip(starts, lens, strict=True)],
            samples=[chunk.samples for chunk in chunks],
            scored=[i for i, chunk in enumerate(chunks) if chunk.prompt_logprobs],
            guesses=[
                Guesses(i, chunk.first_guess, chunk.drafts, chunk.num_drafts)
                for i, chunk in enumerate(chunks)
                if chunk.num_drafts
            ],
        )

    @cached_property
    def num_draws(self) -> list[int]:
        """Tokens that are drawn for each chunk."""
        counts = [int(samples) for samples in self.samples]
        for guesses in self.guesses:
            counts[guesses.chunk] += guesses.num_drafts
        return counts

    @cached_property
    def num_wanted(self) -> list[int]:
        """Tokens of each chunk whose hidden states are needed: those that are scored, else those drawn from."""
        if not self.scored:
            return self.num_draws
        counts = list(self.num_draws)
        for index in self.scored:
            counts[index] = self.lens[index]
        return counts

    @cached_property
    def drawing(self) -> list[int]:
        """Indices of the chunks that sample."""
        return [i for i, samples in enumerate(self.samples) if samples]

    @cached_property
    def draws(self) -> Draws:
        """All draws of the step, chunk by chunk."""
        if not self.guesses:
            drawing = self.drawing
            return Draws(drawing, drawing, [self.rows[i] for i in drawing], [self.ends[i] for i in drawing])
        chunks = [i for i, count in enumerate(self.num_draws) for _ in range(count)]
        offsets = [offset for count in self.num_draws for offset in range(1 - count, 1)]  # from the chunk's last draw
        last_entries = [end - 1 for end in accumulate(max(count, 1) for count in self.num_draws)]
        return Draws(
            chunks,
            [last_entries[i] + offset for i, offset in zip(chunks, offsets, strict=True)],
            [self.rows[i] for i in chunks],
            [self.ends[i] + offset for i, offset in zip(chunks, offsets, strict=True)],
        )

    @cached_property
    def size(self) -> StepSize:
        """The size of the step, as `StepPlan.size` gives it; `PADDING` where there are no chunks."""
        if not self.rows:
            return PADDING
        num_wanted = sum(self.num_wanted)
        return StepSize(sum(self.lens), len(self.rows), max(1, num_wanted), bool(self.scored))

    @cached_property
    def num_decoding(self) -> int:
        """The number of leading chunks that have one token, and drafts behind it or none."""
        drafted = {guesses.chunk for guesses in self.guesses}
        return next((i for i, length in enumerate(self.lens) if length != 1 and i not in drafted), len(self.lens))

    @property
    def has_prompts(self) -> bool:
        """True where a chunk is more than a decode and its drafts."""
        return sum(self.lens) > len(self.lens) + sum(guesses.num_drafts for guesses in self.guesses)

    @property
    def alone(self) -> int:
        """The length of the step's only sequence; 0 where there are several."""
        return self.ends[0] if len(self.ends) == 1 else 0

    @property
    def longest(self) -> int:
        """The most tokens that a sequence has in the step."""
        return max(self.lens, default=1)

    def exact_shape(self, num_wanted: int) -> StepShape:
        """Return the shape of the step without padding, in which so many tokens are wanted."""
        num_seqs, num_tokens = len(self.lens), self.size.num_tokens
        num_decodes = num_seqs
        if num_seqs != num_tokens:
            num_decodes = next(i for i, length in enumerate(self.lens) if length != 1)
        max_drafts = max((guesses.num_drafts for guesses in self.guesses), default=0)
        return StepShape(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            max_query_len=self.longest,
            max_seq_len=max(self.ends),
            num_kv_tokens=sum(self.ends[num_decodes:]),
            num_wanted=None if num_wanted == num_tokens else num_wanted,
            max_drafts=max_drafts if self.num_decoding == num_seqs else 0,
        )


class CurrentBatch:
    """The batch that the device's tables hold, so that only differences are written.

    Where a row begins is the device's own knowledge. So a step of decodes of the same rows as before needs nothing
    written: the steady state of decoding.

    Behind the last sequence all rows are -1, whatever size the step is padded to.
    """

    def __init__(self, tables: RowTables, writes: TableWrites) -> None:
        self._tables = tables
        self._writes = writes
        self.batch = Batch.of([])

    def set(self, batch: Batch, shape: StepShape) -> None:
        """Write the next step's batch, which is padded to `shape`."""
        last = self.batch
        if batch.rows != last.rows or batch.samples != last.samples:
            tables, add = self._tables, self._writes.add
            add(tables.rows.address(0), batch.rows + [-1] * (len(last.rows) - len(batch.rows)))
            add(tables.samples.address(0), batch.samples)
        if not shape.is_decode:
            query_start = list(accumulate(batch.lens, initial=0))
            query_start += query_start[-1:] * (shape.num_seqs - len(batch.lens))
            self._writes.add(self._tables.query_start.address(0), query_start)
        self.batch = batch


@dataclass(frozen=True)
class StepInputs:
    """The tensors that the model reads in a step of one shape, padding included."""

    token_ids: Tensor  # [num_tokens] int32
    caches: tuple[GroupCache | StateCache, ...]  # one a cache group
    wanted: Tensor | None  # [num_wanted] int64: tokens that go through all of the last layer; None: all


class StateInputs:
    """The slots in which the sequences of a step find their states, and leave them, in one cache group.

        source   slot of the last token before the step       entry (start - 1) // checkpoint_tokens of the row
        target   slot of the last token of the step           entry (end - 1) // checkpoint_tokens
        cuts     where other entries end                      their slots, if they are to be kept

    A step of chunks is cut on the CPU, and one of decodes filled on the device; both at fixed addresses.

    Where there are drafts, the device finds the slots of decodes in every step: what is applied to a row's state, and
    what was accepted behind it, is its own knowledge.
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
        """Write the slots and cuts of a step of chunks, padded to `shape`."""
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
        """Find the slots of decodes of the batch in the tables, in the order of the device, and what is replayed."""
        tables, rows = self._tables, self._tables.rows.tensor[0, : shape.num_seqs]
        table, states = tables.blocks[self._group], self.of(shape)
        if states.replay is not None:
            applied = tables.applied[self._group]
            replay_states(table, tables.step.computed, applied, rows, states, self._entry_tokens)
        elif shape.is_decode:
            batch = tables.batch(shape.num_seqs)
            decode_states(table, tables.step.computed, batch, self._entry_tokens, states.sources, states.targets)

    def of(self, shape: StepShape) -> StateBatch:
        """Return the sequences of a step of this shape, which `set` and `fill` fill."""
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
            most_decodes=shape.num_decodes or seqs,  # a captured mix has any number of them
            replay=replay,
        )

    def _num_chunks(self, shape: StepShape) -> int:
        if shape.is_drafted:
            return 0
        decodes = shape.num_decodes
        return most_chunks(shape.num_seqs - decodes, shape.num_tokens - decodes, self._entry_tokens)

    def _checkpoints(self, table: Sequence[int], seq: int, start: int, end: int) -> list[Checkpoint]:
        """Return the checkpoints within the tokens from `start` to `end` of a sequence.

        A slot that was moved on to a later entry (`core.kv.cache_groups`) still stands in the one before.
        """
        size = self._entry_tokens
        cuts = range((start // size + 1) * size, end, size)
        slots = ((cut, table[cut // size - 1]) for cut in cuts)
        unkept = (NOT_KEPT, table[(end - 1) // size])
        return [Checkpoint(seq, cut - start, slot) for cut, slot in slots if slot not in unkept]


class InputBuffers:
    """Memory for the inputs of the largest step; each step uses the front of it."""

    def __init__(
        self,
        tables: RowTables,
        arenas: Sequence[Tensor],
        limits: StepLimits,
        checkpoint_tokens: int,
        drafts: Mapping[int, Tensor],
        groups: Sequence[int] | None = None,
    ) -> None:
        """`arenas`: the blocks of each cache group, the slots of each that keeps states; `drafts`: the places of each
        of these, where there are drafts. `groups`: those of the model, in its order; None: all.
        """
        self._tables = tables
        self._arenas = arenas
        self._drafts = drafts
        self._groups = range(len(arenas)) if groups is None else groups
        self.states = {group: StateInputs(tables, group, limits, checkpoint_tokens) for group in tables.state_slots}
        max_num_seqs, max_num_tokens = limits.max_num_seqs, limits.max_num_batched_tokens

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=tables.memory.device)

        self.token_ids = zeros(max_num_tokens, dtype=torch.int32)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.slots = zeros(len(arenas), max_num_tokens, dtype=torch.int64)
        self.wanted = zeros(max_num_tokens, dtype=torch.int64)
        self.seq_lens = zeros(max_num_seqs, dtype=torch.int32)
        self.table_rows = zeros(max_num_seqs, dtype=torch.int32)
        self._one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=tables.memory.device)
        draws = limits.max_num_draws if limits.max_drafts else 0
        self._places = DrawPlaces(zeros(draws, dtype=torch.int32), zeros(draws, dtype=torch.int32))

    def places(self, num_tokens: int) -> DrawPlaces:
        """Return where the draws of a step with drafts go, which the device fills."""
        return DrawPlaces(self._places.rows[:num_tokens], self._places.positions[:num_tokens])

    def set(self, batch: Batch, shape: StepShape) -> None:
        """Write what the CPU alone knows of a step beside the batch: how chunks of states are cut, and guesses."""
        for states in self.states.values():
            states.set(batch, shape)
        for guesses in batch.guesses:
            if guesses.token_ids:  # else the row has them
                self._tables.guess(batch.rows[guesses.chunk], guesses.first, guesses.token_ids)

    def fill_states(self, shape: StepShape) -> None:
        """Find the slots of the states of decodes. To be called behind what fills the step's other inputs."""
        for states in self.states.values():
            states.fill(shape)

    def of(self, shape: StepShape) -> StepInputs:
        """Return what the model reads in a step of this shape. It means nothing before the backend has filled it."""
        wanted = None if shape.num_wanted is None else self.wanted[: shape.num_wanted]
        return StepInputs(self.token_ids[: shape.num_tokens], self.caches(shape, self._groups), wanted)

    def caches(
        self,
        shape: StepShape,
        groups: Sequence[int],
        batch_of: Callable[[StepShape, int], AttentionBatch] | None = None,
    ) -> tuple[GroupCache | StateCache, ...]:
        """Return some cache groups: as the step of `shape` has them, or, but for states, as `batch_of` a group says."""
        batch_of = batch_of or self._batch
        return tuple(
            StateCache(self.states[group].of(shape), self._arenas[group], self._drafts.get(group))
            if group in self.states
            else GroupCache(batch_of(shape, group), self._arenas[group])
            for group in groups
        )

    def _batch(self, shape: StepShape, group: int) -> AttentionBatch:
        """Return the sequences of a step, placed as the tables of one cache group say."""
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

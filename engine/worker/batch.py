"""The chunks of one step as columns of numbers, on the CPU. Every device's inputs of the step are made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..core.step import PADDING, Chunk, StepSize
from .shapes import StepShape
from .tables import RowTables, Table, TableWrites


class Guesses(NamedTuple):
    """Guesses of tokens in one chunk's row, some of which are the chunk's drafts."""

    chunk: int
    first: int  # index in the row of the first guess
    token_ids: Sequence[int]  # (): the row has them on the device
    num_drafts: int


class Draws(NamedTuple):
    """The tokens that a step draws, one entry for each."""

    chunks: list[int]
    entries: list[int]  # entry in a page of the outputs; a chunk has one for each of its draws, but at least one
    rows: list[int]
    positions: list[int]  # tokens of the row before the drawn one

    def pick(self, numbers: Sequence[int]) -> Draws:
        """Return the draws with these numbers."""
        return Draws(*([column[number] for number in numbers] for column in self))


@dataclass(frozen=True)
class Batch:
    """The chunks of one step as columns, with one entry for each chunk."""

    rows: list[int]
    starts: list[int]  # tokens of the row whose KV exists before the step; an upper bound if that is not known
    lens: list[int]  # tokens of the row that the step runs
    ends: list[int]  # `starts` + `lens`
    samples: list[bool]  # a token is drawn after the chunk, and in the place of each draft
    scored: list[int]  # indices of the chunks whose tokens get prompt logprobs
    guesses: list[Guesses]  # for the chunks that end in drafts

    @classmethod
    def of(cls, chunks: Sequence[Chunk], starts: list[int] | None = None) -> Batch:
        """Return the batch of a plan's chunks. `starts`: the exact ones, if they are known."""
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
        """The number of tokens drawn for each chunk."""
        counts = [int(samples) for samples in self.samples]
        for guesses in self.guesses:
            counts[guesses.chunk] += guesses.num_drafts
        return counts

    @cached_property
    def num_wanted(self) -> list[int]:
        """The number of tokens of each chunk whose hidden states are needed: to score all, or to draw."""
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
        """The size of the step, equal to `StepPlan.size`; `PADDING` without chunks."""
        if not self.rows:
            return PADDING
        num_wanted, drafts = sum(self.num_wanted), [guesses.num_drafts for guesses in self.guesses]
        return StepSize(
            sum(self.lens),
            len(self.rows),
            max(1, num_wanted),
            bool(self.scored),
            num_drafts=sum(drafts),
            max_drafts=max(drafts, default=0),
        )

    @cached_property
    def num_decoding(self) -> int:
        """The number of leading chunks with one token, with or without drafts."""
        drafted = {guesses.chunk for guesses in self.guesses}
        return next((i for i, length in enumerate(self.lens) if length != 1 and i not in drafted), len(self.lens))

    @property
    def single_seq_len(self) -> int:
        """The length of the step's only sequence; 0 if there are several."""
        return self.ends[0] if len(self.ends) == 1 else 0

    def exact_shape(self, num_wanted: int) -> StepShape:
        """Return the shape of the step without padding, with `num_wanted` wanted tokens."""
        num_seqs, size = len(self.lens), self.size
        num_tokens = size.num_tokens
        num_decodes = num_seqs
        if num_seqs != num_tokens:
            num_decodes = next(i for i, length in enumerate(self.lens) if length != 1)
        return StepShape(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_decodes=num_decodes,
            max_query_len=max(self.lens),
            max_seq_len=max(self.ends),
            num_kv_tokens=sum(self.ends[num_decodes:]),
            num_wanted=None if num_wanted == num_tokens else num_wanted,
            max_drafts=size.max_drafts,
            num_draws=size.num_draws if size.num_drafts else None,
        )


class CurrentBatch:
    """The batch in the device's tables. Only differences to the last one are written.

    Only the device knows where each row begins. So a step of decodes of the same rows as before needs no writes at all:
    that is the steady state of decoding.

    After the last sequence, all rows are -1, whatever size the step is padded to.
    """

    def __init__(self, tables: RowTables, writes: TableWrites) -> None:
        self._tables = tables
        self._writes = writes
        self.batch = Batch.of([])
        self.num_guesses = 0  # in the plan of this rank, as the next one
        self.reads_from: int | None = None

    def set(self, batch: Batch, shape: StepShape, num_guesses: int = 0, reads_from: int | None = None) -> None:
        """Write the batch of the next step, which is padded to `shape`. The others: see `StepPlan`."""
        last, self.num_guesses, self.reads_from = self.batch, num_guesses, reads_from
        if batch.rows != last.rows or batch.samples != last.samples:
            tables, add = self._tables, self._writes.add
            add(tables.rows.address(0), batch.rows + [-1] * (len(last.rows) - len(batch.rows)))
            add(tables.samples.address(0), batch.samples)
        if not shape.is_decode:
            self._write_starts(self._tables.query_start, batch.lens, shape.num_seqs)
        if shape.max_drafts:
            num_entries = [max(1, count) for count in batch.num_draws]
            self._write_starts(self._tables.draw_start, num_entries, shape.num_seqs)
        self.batch = batch

    def _write_starts(self, table: Table, lens: Sequence[int], num_seqs: int) -> None:
        """Write the start of each part, given their lengths, and the end for the padding after them."""
        starts = list(accumulate(lens, initial=0))
        self._writes.add(table.address(0), starts + starts[-1:] * (num_seqs - len(lens)))

"""Steps on a GPU, which runs work from its stream while the CPU continues.

    graph of a shape     inputs ─> model ─> logits ─> draws by temperature, top-k, top-p, min-p ─> rows, page of tokens
    after it             rows with penalties, biases, masks or barred stop tokens are drawn again from the same logits,
                         and their drafts are compared again

Nothing here waits for the device. Tables, inputs and logits keep their addresses, so that graphs find them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from baton.kernels.sampling import sample, sample_rows
from baton.kernels.step import (
    RowGuesses,
    StepBuffers,
    accept_again,
    accept_tokens,
    chunk_inputs,
    decode_inputs,
    place_drafts,
    replace_tokens,
    store_tokens,
)

from ...core.step import Chunk
from ...layers.step_context import RankRows
from ..batch import Batch, Draws
from ..inputs import StepInputs
from ..outputs import Event
from ..shapes import Shapes, StepShape
from ..tables import TableWrites
from . import DeviceStep, Graph, StepParts
from .cuda_stream import Stream
from .guesses import HeadGuesser, ModelGuesser, ReadSize, make_guesser
from .staged_writes import StagedWrites

_MOST_READS = 8  # captured reads of a draft model after a step


class CudaBackend:
    """Implements `Backend` over a stream."""

    def __init__(self, stream: Stream, shapes: Shapes, logits_dtype: torch.dtype) -> None:
        self.device = stream.device
        self.shapes = shapes
        self._stream = stream
        self._logits_dtype = logits_dtype

    def in_order(self) -> AbstractContextManager[Any]:
        return self._stream.current()

    def zeros(self, num_values: int) -> Tensor:
        return torch.zeros(num_values, dtype=torch.int32, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._stream.pinned(shape, dtype)

    def event(self) -> Event:
        return self._stream.event()

    def table_writes(self, memory: Tensor) -> TableWrites:
        return StagedWrites(memory, self._stream)

    def make_step(self, parts: StepParts) -> DeviceStep:
        return CudaStep(parts, self._stream, self._logits_dtype)

    def synchronize(self) -> None:
        self._stream.synchronize()


class CudaStep:
    """Implements `DeviceStep`. The last token of every sequence is wanted, and a token is drawn after it.

    With drafts, the same holds for the token before each draft (`DrawPlaces`).
    """

    def __init__(self, parts: StepParts, stream: Stream, logits_dtype: torch.dtype) -> None:
        self._parts = parts
        self._stream = stream
        shape = (parts.limits.max_num_draws, parts.vocab_size)
        # One row for each sequence of the step; with drafts, for each entry of `DrawPlaces`.
        self.logits = torch.zeros(*shape, dtype=logits_dtype, device=stream.device)
        num_drawn = parts.limits.max_num_draws if parts.limits.max_drafts else 0
        self._drawn = torch.zeros(num_drawn, dtype=torch.int64, device=stream.device)  # with drafts; rows as above
        self._has_drafts = False  # in the newest step
        self._guesser = make_guesser(parts)
        self._guess_graphs: dict[int, Callable[[], object]] = {}  # by number of sequences
        self._read_graphs: dict[ReadSize, Callable[[], object]] = {}
        self._guesses = RowGuesses(parts.tables.guesses.tensor, parts.tables.first_guess.tensor[0])

    def known_starts(self, chunks: Sequence[Chunk]) -> list[int] | None:
        return None

    def run(self, shape: StepShape, ranks: RankRows | None = None) -> Tensor:
        if shape.max_drafts:
            return self._run_drafts(shape, ranks)
        parts, tables = self._parts, self._parts.tables
        buffers, batch = self._buffers(shape), tables.batch(shape.num_seqs)
        fill = decode_inputs if shape.is_decode else chunk_inputs
        fill(tables.step, batch, buffers)
        parts.inputs.fill_states(shape)
        inputs = parts.inputs.of(shape)
        hidden, read = self._forward(inputs, inputs.wanted, ranks)
        last = hidden if len(hidden) == shape.num_seqs else hidden[buffers.last_tokens]
        logits = self.logits[: shape.num_seqs]
        parts.model.logits(last, out=logits)
        drawn = sample_rows(logits, tables.sampling.tensor, batch.rows, buffers.seq_lens)
        store_tokens(drawn, tables.step, batch, buffers, parts.outputs.ring)
        if isinstance(self._guesser, HeadGuesser) and read is not None:
            self._guesser.read(shape, read, ranks)
        return hidden

    def _forward(
        self, inputs: StepInputs, wanted: Tensor | None, ranks: RankRows | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states of the wanted tokens, or of all, and a draft head's input for all tokens."""
        model = self._parts.model
        if isinstance(self._guesser, HeadGuesser):
            return model.forward_all(inputs.token_ids, inputs.caches, ranks)
        return model.forward(inputs.token_ids, inputs.caches, wanted, ranks), None

    def _run_drafts(self, shape: StepShape, ranks: RankRows | None) -> Tensor:
        parts, tables = self._parts, self._parts.tables
        assert shape.num_draws is not None, "there are drafts"
        batch, places = tables.batch(shape.num_seqs), parts.inputs.places(shape.num_draws)
        place_drafts(tables.step, self._guesses, batch, places)
        chunk_inputs(tables.step, batch, self._buffers(shape))
        parts.inputs.fill_states(shape)
        inputs = parts.inputs.of(shape)
        hidden, read = self._forward(inputs, None if shape.num_wanted is None else places.tokens, ranks)
        logits = self.logits[: shape.num_draws]
        parts.model.logits(hidden if len(hidden) == shape.num_draws else hidden[places.tokens], out=logits)
        drawn = self._drawn[: shape.num_draws]
        drawn.copy_(sample_rows(logits, tables.sampling.tensor, places.rows, places.positions))
        accept_tokens(drawn, tables.step, batch, parts.outputs.ring, shape.max_drafts)
        if isinstance(self._guesser, HeadGuesser) and read is not None:
            self._guesser.read(shape, read, ranks)
        return hidden

    def guess(self, shape: StepShape, num_guesses: int, ranks: RankRows | None = None) -> None:
        """Make no guesses, or the most that a request can get, since only that number is captured.

        With `ranks`, which have steps of different sizes, nothing is replayed.
        """
        guesser = self._guesser
        assert guesser is not None, "only steps that guess have a guesser"
        if isinstance(guesser, ModelGuesser):
            num_guesses, ranks = guesser.own_guesses(num_guesses), None
            self._read_tokens(guesser, shape, num_guesses)
        if not num_guesses:
            return
        graph = self._guess_graphs.get(shape.num_seqs) if ranks is None else None
        if graph is None:
            guesser.guess(shape.num_seqs, self._parts.limits.max_drafts, ranks)
        else:
            graph()

    def _read_tokens(self, guesser: ModelGuesser, shape: StepShape, num_guesses: int) -> None:
        """Have a draft model read what it must after the step; after one of nothing but padding, that padding."""
        batch = self._parts.current.batch
        size = guesser.due(batch, num_guesses) if batch.rows else ReadSize.of(shape)
        if size is None:
            return
        pieces = self._captured_reads(size)
        is_captured = ReadSize.of(shape) in self._read_graphs
        if len(pieces) > (_MOST_READS if is_captured else 1) or not pieces:
            guesser.read_all(size)
            return
        for piece in pieces:
            self._read_graphs[piece]()

    def _captured_reads(self, size: ReadSize) -> list[ReadSize]:
        """Return captured sizes that read so much one after the other; an empty list if there are none for it.

        To launch a read that is not captured takes the CPU longer than the device needs for a captured step, so the end
        of the step before would be noticed late. Beside a step that is not captured the device has enough to do.
        """
        serving = [
            known
            for known in self._read_graphs
            if known.num_seqs >= size.num_seqs and known.longest >= min(size.longest, known.num_tokens)
        ]
        if not serving:
            return []
        most = max(known.num_tokens for known in serving)
        num_full, rest = divmod(size.num_tokens, most)
        lens = [most] * num_full + [rest] * (rest > 0)
        return [
            min(
                (known for known in serving if known.num_tokens >= num_tokens),
                key=lambda known: (known.num_tokens, known.num_seqs, known.longest),
            )
            for num_tokens in lens
        ]

    def capture(self, shape: StepShape) -> Graph | None:
        replay = self._stream.capture(functools.partial(self.run, shape))
        guesser, num_seqs = self._guesser, shape.num_seqs
        size = ReadSize.of(shape)
        if isinstance(guesser, ModelGuesser) and size not in self._read_graphs:
            self._read_graphs[size] = self._stream.capture(functools.partial(guesser.read, size))
        if guesser is not None and num_seqs not in self._guess_graphs:
            guess = functools.partial(guesser.guess, num_seqs, self._parts.limits.max_drafts)
            self._guess_graphs[num_seqs] = self._stream.capture(guess)

        def graph() -> None:
            replay()

        return graph

    def draw(self, batch: Batch, shape: StepShape, hidden: Tensor | None) -> None:
        """Draw again for rows whose logits are edited. The new tokens replace those that `run` stored."""
        self._has_drafts = shape.max_drafts > 0
        draws, processors = batch.draws, self._parts.processors
        numbers = processors.edited(draws)
        if not numbers:
            return
        edited = draws.pick(numbers)
        entries = self.indices(edited.entries)
        tables, ring = self._parts.tables, self._parts.outputs.ring
        edits = processors.of_draws(edited)
        if self._has_drafts and edits.history is not None:
            self._restore_drafts(batch, edited)
        drawn = sample(self.logits[entries], edits)
        batch_rows, buffers = tables.batch(shape.num_seqs), self._buffers(shape)
        if self._has_drafts:
            self._drawn[entries] = drawn
            index = self.indices(list(dict.fromkeys(edited.chunks)))
            accept_again(self._drawn, index, tables.step, self._guesses, batch_rows, buffers, ring, shape.max_drafts)
        else:
            replace_tokens(drawn, self.indices(edited.chunks), entries, tables.step, batch_rows, buffers, ring)

    def _restore_drafts(self, batch: Batch, edited: Draws) -> None:
        """Write drafts into their rows again, before draws that depend on the preceding tokens.

        An edited draw must see the drafts before it, as the logits have, even if `accept_tokens` stored another token.
        The positions are known: if a request's draws are edited, it has no unsettled drafts when a step is planned.
        """
        last = batch.ends
        drafts = [i for i, chunk in enumerate(edited.chunks) if edited.positions[i] < last[chunk]]
        if not drafts:
            return
        _, _, rows, positions = map(self.indices, edited.pick(drafts))
        numbers, width = positions - self._guesses.first[rows], self._guesses.token_ids.shape[1]
        guessed = self._guesses.token_ids[rows, numbers.clamp(0, width - 1)]
        is_known = (numbers >= 0) & (numbers < width)
        self._parts.tables.tokens.tensor[rows, positions] = torch.where(is_known, guessed, 0)

    def logits_of(self, numbers: list[int]) -> Tensor:
        return self.logits[self.indices(self._parts.current.batch.draws.pick(numbers).entries)]

    def drawn(self, numbers: list[int]) -> Tensor:
        draws, tables = self._parts.current.batch.draws.pick(numbers), self._parts.tables
        if self._has_drafts:
            return self._drawn[self.indices(draws.entries)].clamp(min=0)
        rows = self.indices(draws.rows)
        return tables.tokens.tensor[rows, tables.computed.tensor[0, rows].long()].long()

    def to_logits(self, hidden: Tensor) -> Tensor:
        return self._parts.model.logits(hidden)

    def indices(self, numbers: list[int]) -> Tensor:
        pinned = self._stream.pinned((len(numbers),), torch.int64)
        pinned.copy_(torch.tensor(numbers))
        return pinned.to(self._stream.device, non_blocking=True)

    def to_host(self, column: Tensor) -> Tensor:
        pinned = self._stream.pinned(column.shape, column.dtype)
        return pinned.copy_(column, non_blocking=True)

    def _buffers(self, shape: StepShape) -> StepBuffers:
        """Return the inputs of a step of this shape, for the kernels that fill them."""
        inputs, seqs, tokens = self._parts.inputs, shape.num_seqs, shape.num_tokens
        return StepBuffers(
            token_ids=inputs.token_ids[:tokens],
            positions=inputs.positions[:tokens],
            slots=inputs.slots[:, :tokens],
            seq_lens=inputs.seq_lens[:seqs],
            table_rows=inputs.table_rows[:seqs],
            last_tokens=inputs.wanted[:seqs],
        )

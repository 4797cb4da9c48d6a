"""Steps on a CPU, which are computed by the time that their launch returns.

    at start-up      the model's native calls are recorded, once for each captured shape (`kernels.native.cpu_graph`)
    a step           numpy fills the inputs from the tables; the recorded calls for its shape are made again, without
                     the model's Python; then logits are computed, and tokens drawn and stored

Replayed calls compute no more rows than the step has. A model that does more than call native functions (products of
torch's own, collectives, experts) has no CPU graphs, and runs its Python.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.native.calls import NotRecordable
from baton.kernels.native.cpu_graph import Workspace, record
from baton.kernels.sampling import sample
from baton.kernels.step import REJECTED

from ...core.layout import BLOCK_SIZE
from ...core.step import Chunk
from ...layers.step_context import RankRows, rows_at
from ..batch import Batch, Guesses
from ..outputs import Event
from ..shapes import Shapes, StepShape
from ..tables import TableWrites, Values
from . import DeviceStep, Graph, StepParts
from .guesses import HeadGuesser, make_guesser

logger = logging.getLogger(__name__)


class CpuBackend:
    """Implements `Backend`."""

    def __init__(self, shapes: Shapes) -> None:
        self.device = torch.device("cpu")
        self.shapes = shapes

    def in_order(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def zeros(self, num_values: int) -> Tensor:
        # numpy gets zeroed pages from the system and touches none, so large tables cost addresses, not memory.
        return torch.from_numpy(np.zeros(num_values, np.int32))

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def event(self) -> Event:
        return _PassedEvent()

    def table_writes(self, memory: Tensor) -> TableWrites:
        return _DirectWrites(memory)

    def make_step(self, parts: StepParts) -> DeviceStep:
        return CpuStep(parts)

    def synchronize(self) -> None:
        pass


class CpuStep:
    """Implements `DeviceStep`."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        tables, inputs = parts.tables, parts.inputs
        # numpy views of the same memory: for such small arrays, numpy is faster than torch.
        self._tokens, self._blocks = tables.tokens.tensor.numpy(), tables.blocks.numpy()
        self._rows, self._computed = tables.rows.tensor[0].numpy(), tables.computed.tensor[0].numpy()
        self._query_start = tables.query_start.tensor[0].numpy()
        self._token_ids, self._positions = inputs.token_ids.numpy(), inputs.positions.numpy()
        self._slots, self._wanted = inputs.slots.numpy(), inputs.wanted.numpy()
        self._seq_lens, self._table_rows = inputs.seq_lens.numpy(), inputs.table_rows.numpy()
        self._logits: Tensor | None = None  # of the step's draws, in order
        self._hidden: Tensor | None = None  # of all tokens of the step, for guesses on the device
        self._guesser = make_guesser(parts)
        self._reads_hidden = isinstance(self._guesser, HeadGuesser)
        self._drawn: NDArray[np.int64] = np.zeros(0, np.int64)  # the tokens drawn from `_logits`
        self._workspace = Workspace()
        self._unrecordable: set[bool] = set()  # True: steps of decodes cannot be recorded; False: mixed steps cannot

    def known_starts(self, chunks: Sequence[Chunk]) -> list[int] | None:
        starts: list[int] = self._computed[[chunk.row for chunk in chunks]].tolist()
        return starts

    def run(self, shape: StepShape, ranks: RankRows | None = None) -> Tensor:
        self._fill(shape)
        return self._forward(shape, ranks)

    def capture(self, shape: StepShape) -> Graph | None:
        """Record the model's calls. It computes nothing."""
        if shape.is_decode in self._unrecordable:
            return None
        sizes = [size for size in (shape.num_tokens, shape.num_wanted) if size is not None]
        try:
            if self._reads_hidden:
                raise NotRecordable("all hidden states, for its draft head")
            if self._parts.inputs.states:
                raise NotRecordable("states, and cuts a step by the tables of their slots")
            recording = record(lambda: self._forward(shape, None), self._workspace, sizes)
        except NotRecordable as reason:
            self._unrecordable.add(shape.is_decode)
            unit = "decodes" if shape.is_decode else "tokens"
            logger.info("steps of %d %s or more run without a CPU graph: the model needs %s", sizes[0], unit, reason)
            return None

        def replay() -> Tensor:
            self._fill(shape)
            size = self._parts.current.batch.size
            if shape.num_wanted is None:
                recording.graph.replay(size.num_tokens)
                return recording.answer[: size.num_tokens]
            recording.graph.replay(size.num_tokens, size.num_wanted)
            return recording.answer[: size.num_wanted]

        return replay

    def draw(self, batch: Batch, shape: StepShape, hidden: Tensor | None) -> None:
        num_seqs, draws = len(batch.rows), batch.draws
        self._computed[self._rows[:num_seqs]] = self._seq_lens[:num_seqs]
        if not draws.chunks:
            return
        assert hidden is not None, "steps on a CPU keep their hidden states"
        if len(draws.chunks) < len(hidden):
            chunks = np.array(draws.chunks)
            behind = np.array(batch.ends)[chunks] - draws.positions
            hidden = hidden[torch.from_numpy(np.cumsum(batch.num_wanted)[chunks] - 1 - behind)]
        self._logits = self._parts.model.logits(hidden)
        drawn = self._drawn = sample(self._logits, self._parts.processors.of_draws(draws)).numpy()
        if batch.guesses:
            drawn = self._reject(batch, drawn)
        self._parts.outputs.tokens.numpy()[draws.entries] = drawn
        # A row for which no token can be drawn gets token 0: a step that is already planned continues from it.
        self._tokens[draws.rows, draws.positions] = np.maximum(drawn, 0)

    def _reject(self, batch: Batch, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Mark the draws after wrong drafts as rejected, and no longer count their tokens as computed."""
        drawn = drawn.copy()
        ends = list(accumulate(batch.num_draws))
        for chunk, _, _, num_drafts in batch.guesses:
            row, end = batch.rows[chunk], batch.ends[chunk]
            draws = drawn[ends[chunk] - num_drafts - 1 : ends[chunk]]
            wrong = draws[:-1] != self._tokens[row, end - num_drafts : end]
            num_right = int(wrong.argmax()) if wrong.any() else num_drafts
            draws[num_right + 1 :] = REJECTED
            self._computed[row] -= num_drafts - num_right
        return drawn

    def logits_of(self, numbers: list[int]) -> Tensor:
        assert self._logits is not None
        return self._logits[torch.tensor(numbers)]

    def drawn(self, numbers: list[int]) -> Tensor:
        # If no token could be drawn, the row has token 0.
        return torch.from_numpy(np.maximum(self._drawn[numbers], 0))

    def to_logits(self, hidden: Tensor) -> Tensor:
        return self._parts.model.logits(hidden)

    def indices(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers)

    def to_host(self, column: Tensor) -> Tensor:
        return column

    def _forward(self, shape: StepShape, ranks: RankRows | None) -> Tensor:
        inputs = self._parts.inputs.of(shape)
        if not self._reads_hidden:
            return self._parts.model.forward(inputs.token_ids, inputs.caches, inputs.wanted, ranks)
        hidden, self._hidden = self._parts.model.forward_all(inputs.token_ids, inputs.caches, ranks)
        return hidden if inputs.wanted is None else rows_at(hidden, inputs.wanted)

    def guess(self, shape: StepShape, num_guesses: int, ranks: RankRows | None = None) -> None:
        batch, guesser = self._parts.current.batch, self._guesser
        assert guesser is not None, "only steps that guess have a guesser"
        if batch.rows:  # else the whole step is padding, and keeps its shape
            shape = batch.exact_shape(batch.size.num_wanted)  # nothing here is recorded, so no padding is needed
        if isinstance(guesser, HeadGuesser):
            assert self._hidden is not None, "the step kept them for the head"
            guesser.read(shape, self._hidden, ranks)
        else:
            num_guesses, ranks = guesser.own_guesses(num_guesses), None
            if guesser.due(batch, num_guesses) is not None:
                guesser.read_exactly(shape.num_seqs)
        if num_guesses:
            guesser.guess(shape.num_seqs, num_guesses, ranks)

    def _fill(self, shape: StepShape) -> None:
        """Fill the inputs from the tables. Padding has slot -1 and length 0; its other inputs keep old values."""
        batch = self._parts.current.batch
        num_seqs = num_tokens = len(batch.rows)
        rows = self._rows[:num_seqs]
        starts = self._computed[rows]
        for guesses in batch.guesses:
            self._place(batch, guesses)
        if shape.is_decode:
            token_rows, positions = rows, starts
            self._seq_lens[:num_seqs] = starts + 1
        else:
            query_start = self._query_start[: num_seqs + 1]
            num_tokens = int(query_start[-1])
            lens = np.diff(query_start)
            token_rows = np.repeat(rows, lens)
            positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], lens)
            self._seq_lens[:num_seqs] = starts + lens
        self._table_rows[:num_seqs] = rows
        self._token_ids[:num_tokens] = self._tokens[token_rows, positions]
        self._positions[:num_tokens] = positions
        blocks = self._blocks[:, token_rows, positions // BLOCK_SIZE]
        self._slots[:, :num_tokens] = blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        self._slots[:, num_tokens : shape.num_tokens] = -1
        self._seq_lens[num_seqs : shape.num_seqs] = 0
        if shape.num_wanted is not None:
            self._fill_wanted(batch)
        self._parts.inputs.fill_states(shape)

    def _place(self, batch: Batch, guesses: Guesses) -> None:
        """Write a chunk's drafts into its row: the guesses of those tokens that the chunk runs."""
        row, end, num_drafts = batch.rows[guesses.chunk], batch.ends[guesses.chunk], guesses.num_drafts
        if not guesses.token_ids:
            assert self._guesser is not None, "only a drafter on the device leaves guesses in rows"
            self._tokens[row, end - num_drafts : end] = self._parts.tables.guesses.tensor[row, :num_drafts]
            return
        first = end - num_drafts - guesses.first
        self._tokens[row, end - num_drafts : end] = guesses.token_ids[first : first + num_drafts]

    def _fill_wanted(self, batch: Batch) -> None:
        """Write the indices of the last `num_wanted` tokens of each chunk.

        If no chunk wants any, the step's last token is wanted: the last layer's all-reduce must wait for every rank,
        or rank 0 would take the step for done before the others have written their keys and values.
        """
        counts = np.array(batch.num_wanted)
        ends = counts.cumsum()
        num_wanted = int(ends[-1])
        query_ends = np.cumsum(batch.lens)  # the table of where queries start is not written for single tokens
        if num_wanted:
            self._wanted[:num_wanted] = np.arange(num_wanted) + np.repeat(query_ends - ends, counts)
        else:
            self._wanted[0] = query_ends[-1] - 1


class _DirectWrites:
    """Applies changes to tables in host memory at once. Implements `TableWrites`."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory.numpy()
        self.num_flushes = 0

    def add(self, address: int, values: Values) -> None:
        self._memory[address : address + len(values)] = values

    def add_singles(self, addresses: Sequence[int], values: Sequence[int]) -> None:
        self._memory[addresses] = values

    def flush(self) -> None:
        pass

    def capture(self) -> None:
        pass


class _PassedEvent:
    """An event on a device whose work is done as soon as it is launched."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

"""The kinds of device that a runner works on, behind one interface.

cpu.py             computes when it is called; its captured steps are recorded calls of native functions
cuda.py            launches and never waits; its captured steps are CUDA graphs
cuda_stream.py     the stream, events, pinned memory and graphs of a GPU
staged_writes.py   changes to the row tables, in a pinned buffer that a GPU reads in place
guesses.py         guesses of the model's draft head, or of a draft model, at the end of a step of either kind
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core.step import Chunk, StepSize
from ...layers.attention import GroupCache, StateCache
from ...layers.base import RankRows
from ...layers.draft_head import DraftStates
from ..batch import Batch, CurrentBatch
from ..inputs import InputBuffers
from ..outputs import Event, StepOutputs
from ..sampling import LogitsProcessors, StepLogits
from ..shapes import Shapes, StepLimits, StepShape
from ..tables import RowTables, TableWrites

Graph = Callable[[], Tensor | None]  # runs a captured step; returns what `DeviceStep.run` returns, if it is kept


class GuessingHead(Protocol):
    """The part of a draft head that the runner calls: of the model's own, or of one that was loaded beside it."""

    @property
    def num_draft_layers(self) -> int:
        """Several of them guess one token each, a single one any number."""
        ...

    def draft(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        caches: Sequence[GroupCache | StateCache],
        wanted: Tensor | None = None,
        of_ranks: tuple[int, ...] | None = None,
        number: int = 0,
    ) -> DraftStates:
        """Return what the draft head gives for the `wanted` [R] int64 tokens, or for all; write all of its KV.

        `hidden` [T, ...] is what the head reads of all tokens, `token_ids` [T] the tokens that follow them. Called
        only where this guesses. `of_ranks`: for how many tokens each data-parallel rank gets something, where they run
        this together; None: for as many as this one. `number`: the draft layer.
        """
        ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`[R, hidden_size] -> [R, vocab_size]`, float32 on a CPU; written to `out`, of the model's dtype, if given."""
        ...


class Model(GuessingHead, Protocol):
    """The part of a model that the runner calls."""

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[GroupCache | StateCache],
        wanted: Tensor | None,
        ranks: RankRows | None = None,
    ) -> Tensor:
        """Return the hidden states behind the last norm of the `wanted` `[R]` int64 tokens, or of all; write all KV.

        `ranks`: how many rows the data-parallel ranks have that run this step together; None: as many as this one.
        """
        ...

    def forward_all(
        self, token_ids: Tensor, caches: Sequence[GroupCache | StateCache], ranks: RankRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all tokens, as `forward` does, and what a draft head reads of them [T, ...]."""
        ...

    def shortened(self) -> AbstractContextManager[None]:
        """Within, a step runs each of the model's kernels, but not for every layer."""
        ...


class DraftModel(NamedTuple):
    """A second model, or a head beside the first one, which guesses what that will draw."""

    groups: Sequence[int]  # its cache groups, among those of the engine
    model: Model | None = None
    head: GuessingHead | None = None


@dataclass(frozen=True)
class StepParts:
    """The objects that the steps of one runner read and write."""

    model: Model
    groups: Sequence[int]  # the model's cache groups
    draft_model: DraftModel | None  # guesses in the place of the model's draft head
    tables: RowTables
    current: CurrentBatch
    inputs: InputBuffers
    outputs: StepOutputs
    processors: LogitsProcessors
    limits: StepLimits
    vocab_size: int


class DeviceStep(StepLogits, Protocol):
    """One step on one kind of device. What it leaves behind is valid until the next one runs."""

    def known_starts(self, chunks: Sequence[Chunk]) -> list[int] | None:
        """Return where each chunk begins, where that is known: the plan has the most it may be. Else None."""
        ...

    def run(self, shape: StepShape, ranks: RankRows | None = None) -> Tensor:
        """Fill the inputs from the tables and run the model; return the hidden states of the wanted tokens.

        Of a shape that holds more than the current batch, the rest is padding. `ranks`: see `Model.forward`.
        """
        ...

    def capture(self, shape: StepShape) -> Graph | None:
        """Record `run` for a shape; None if the model cannot be recorded in that size."""
        ...

    def draw(self, batch: Batch, shape: StepShape, hidden: Tensor | None) -> None:
        """Store the tokens of the chunks that sample in their rows and in the current page of the outputs."""
        ...

    def guess(self, shape: StepShape, num_guesses: int, ranks: RankRows | None = None) -> None:
        """Write what the drafter keeps of the step's tokens, and store guesses in the rows of chunks that sample.

        They are of the `num_guesses` tokens behind the last one drawn, or of more. Called behind `draw`, only where
        `StepLimits.guesses_on_device`. `ranks` are those of `run`.
        """
        ...


class Backend(Protocol):
    """One kind of device: memory, order of work, and its steps."""

    device: torch.device
    shapes: Shapes

    def in_order(self) -> AbstractContextManager[Any]:
        """Within, work goes to the device in the order of the steps."""
        ...

    def zeros(self, num_values: int) -> Tensor:
        """Return int32 zeros on the device."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory that the device reads and writes in place."""
        ...

    def event(self) -> Event: ...

    def table_writes(self, memory: Tensor) -> TableWrites: ...

    def make_step(self, parts: StepParts) -> DeviceStep: ...

    def synchronize(self) -> None:
        """Wait for all work so far."""
        ...


class CapturedSteps:
    """Steps of fixed sizes that were recorded once; any other size runs eagerly."""

    def __init__(self, step: DeviceStep, shapes: Shapes) -> None:
        self._step = step
        self._shapes = shapes
        self._graphs: dict[StepShape, Graph] = {}
        self.num_replays = self.num_eager = 0

    def capture_all(self) -> None:
        """Capture every size; on a GPU after each has run once, since a capture would compile and load kernels."""
        for shape in self._shapes.in_capture_order():
            if (graph := self._step.capture(shape)) is not None:
                self._graphs[shape] = graph

    def fitting(self, sizes: Sequence[StepSize], *, alone: int) -> StepShape | None:
        """Return the smallest captured shape that serves the steps of all ranks; None if none does.

        `alone`: see `Shapes.fitting`.
        """
        shape = self._shapes.fitting(sizes, alone=alone)
        return shape if shape in self._graphs else None

    def rows_of_ranks(self, sizes: Sequence[StepSize]) -> RankRows:
        """Return the rows of each rank in a step that all run eagerly: padded where a captured size would serve one."""
        rows = []
        for size in sizes:
            shape = self.fitting([size], alone=0)
            if shape is None:
                rows.append((size.num_tokens, self._shapes.num_wanted(size), size.num_seqs))
            else:
                rows.append((shape.num_tokens, shape.wanted_rows, shape.num_seqs))
        return RankRows(*zip(*rows, strict=True))

    def run(self, shape: StepShape, ranks: RankRows | None = None) -> Tensor | None:
        """Return the hidden states of the wanted tokens, if they are kept.

        With `ranks`, the ranks run steps of different sizes, and none is replayed.
        """
        graph = self._graphs.get(shape) if ranks is None else None
        if graph is None:
            self.num_eager += 1
            return self._step.run(shape, ranks)
        self.num_replays += 1
        return graph()

"""The kinds of device that a runner supports, behind one interface.

cpu.py             computes synchronously; its captured steps are recorded calls of native functions
cuda.py            launches and never waits; its captured steps are CUDA graphs
cpu_shapes.py      the sizes of steps that are captured on a CPU
cuda_shapes.py     ... on a GPU
cuda_stream.py     the stream, events, pinned memory and graphs of a GPU
staged_writes.py   changes to the row tables, in a pinned buffer that a GPU reads in place
guesses/           guesses at the end of a step, by the model's draft head or by a draft model; for both kinds of device
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core.step import Chunk, StepSize
from ...layers.draft_head import DraftStates
from ...layers.step_context import GroupCache, RankRows, StateCache
from ..batch import Batch, CurrentBatch
from ..inputs import InputBuffers
from ..outputs import Event, StepOutputs
from ..sampling import LogitsProcessors, StepLogits
from ..shapes import Shapes, StepLimits, StepShape
from ..tables import RowTables, TableWrites

Graph = Callable[[], Tensor | None]  # runs a captured step; returns what `DeviceStep.run` does, or None (CUDA graphs)


class GuessingHead(Protocol):
    """The part of a draft head that the runner calls: the model's own head, or one that was loaded beside it."""

    @property
    def num_draft_layers(self) -> int:
        """The number of draft layers. One layer alone guesses any number of tokens; of several, each guesses one."""
        ...

    def draft(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        caches: Sequence[GroupCache | StateCache],
        wanted: Tensor | None = None,
        ranks: RankRows | None = None,
        number: int = 0,
    ) -> DraftStates:
        """Return the draft head's states for the `wanted` [R] int64 tokens, or for all. Writes the KV of all tokens.

        `hidden` [T, ...] is the head's input for all tokens, and `token_ids` [T] are the tokens that follow them. Only
        called in engines in which this head guesses. If data-parallel ranks run this together, each gets states for
        `ranks.seqs` tokens; None: for as many as this rank. `number`: the draft layer.
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
        """Return the hidden states after the last norm, of the `wanted` `[R]` int64 tokens or of all. Writes all KV.

        `ranks`: the numbers of rows of the data-parallel ranks that run this step together; None: the same as here.
        """
        ...

    def forward_all(
        self, token_ids: Tensor, caches: Sequence[GroupCache | StateCache], ranks: RankRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all tokens, as `forward` does, and a draft head's input for them [T, ...]."""
        ...

    def shortened(self) -> AbstractContextManager[None]:
        """Return a context in which a step runs each of the model's kernels, but not in every layer."""
        ...


class DraftModel(NamedTuple):
    """A second model, or a head beside the first one, which guesses what the first will draw."""

    groups: Sequence[int]  # its cache groups, among those of the engine
    model: Model | None = None
    head: GuessingHead | None = None


@dataclass(frozen=True)
class StepParts:
    """The objects that the steps of one runner read and write."""

    model: Model
    draft_model: DraftModel | None  # guesses instead of the model's own draft head
    tables: RowTables
    current: CurrentBatch
    inputs: InputBuffers
    outputs: StepOutputs
    processors: LogitsProcessors
    limits: StepLimits
    vocab_size: int


class DeviceStep(StepLogits, Protocol):
    """A step on one kind of device. What it leaves on the device is valid until the next step runs."""

    def known_starts(self, chunks: Sequence[Chunk]) -> list[int] | None:
        """Return the start of each chunk, if the host knows it; else None. Plans have upper bounds only."""
        ...

    def run(self, shape: StepShape, ranks: RankRows | None = None) -> Tensor:
        """Fill the inputs from the tables and run the model. Returns the hidden states of the wanted tokens.

        If the shape is larger than the current batch, the rest is padding. `ranks`: see `Model.forward`.
        """
        ...

    def capture(self, shape: StepShape) -> Graph | None:
        """Record `run` for a shape. Returns None if the model cannot be recorded in that size."""
        ...

    def draw(self, batch: Batch, shape: StepShape, hidden: Tensor | None) -> None:
        """Draw for the chunks that sample. Stores the tokens in their rows and in the current page of the outputs."""
        ...

    def guess(self, shape: StepShape, num_guesses: int, ranks: RankRows | None = None) -> None:
        """Write what the drafter keeps of the step's tokens, and store guesses in the rows of chunks that sample.

        At least `num_guesses` tokens are guessed after the last one drawn. Called after `draw`, only if
        `StepLimits.guesses_on_device`. `ranks` are those of `run`.
        """
        ...


class Backend(Protocol):
    """One kind of device: memory, order of work, and its steps."""

    device: torch.device
    shapes: Shapes

    def in_order(self) -> AbstractContextManager[Any]:
        """Return a context in which work goes to the device in the order of the steps."""
        ...

    def zeros(self, num_values: int) -> Tensor:
        """Return int32 zeros on the device."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory that the device can read and write in place."""
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
        """Capture every size. On a GPU each must have run before, so that no capture compiles or loads kernels."""
        for shape in self._shapes.in_capture_order():
            if (graph := self._step.capture(shape)) is not None:
                self._graphs[shape] = graph

    def fitting(self, sizes: Sequence[StepSize], *, single_seq_len: int) -> StepShape | None:
        """Return the smallest captured shape that serves the steps of all ranks; None if there is none.

        `single_seq_len`: see `Shapes.fitting`.
        """
        shape = self._shapes.fitting(sizes, single_seq_len=single_seq_len)
        return shape if shape in self._graphs else None

    def rows_of_ranks(self, sizes: Sequence[StepSize]) -> RankRows:
        """Return the rows of each rank in a step that all run eagerly: padded if a captured size would serve it."""
        rows = []
        for size in sizes:
            shape = self.fitting([size], single_seq_len=0)
            if shape is None:
                rows.append((size.num_tokens, self._shapes.num_wanted(size), size.num_seqs))
            else:
                rows.append((shape.num_tokens, shape.wanted_rows, shape.num_seqs))
        return RankRows(*zip(*rows, strict=True))

    def run(self, shape: StepShape, ranks: RankRows | None = None) -> Tensor | None:
        """Run a step. Returns the hidden states of the wanted tokens, if they are kept.

        With `ranks`, the ranks have steps of different sizes, so the step is not replayed.
        """
        graph = self._graphs.get(shape) if ranks is None else None
        if graph is None:
            self.num_eager += 1
            return self._step.run(shape, ranks)
        self.num_replays += 1
        return graph()

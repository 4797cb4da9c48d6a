"""One step on the device, from the tables to the next tokens: what a graph captures, and what runs eagerly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton.kernels.sampling import sample_rows
from baton.kernels.step import OutputRing, store_tokens

from ...core.step import StepSize
from ...layers.rows import RankRows
from ..runner import Model
from .inputs import StepInputs
from .queue import Queue
from .shapes import CapturedShapes, StepShape
from .tables import DeviceTables


@dataclass(frozen=True)
class Step:
    """Inputs, model, logits, tokens. Every row's token is drawn here, as far as temperature and truncation go.

    What a step leaves behind is valid until the next one runs.
    """

    model: Model
    kv: torch.Tensor
    tables: DeviceTables
    inputs: StepInputs
    mailbox: OutputRing
    logits: torch.Tensor  # [max_num_seqs, vocab_size], of the model's type: those of each sequence's last token

    def __call__(self, shape: StepShape, ranks: RankRows | None = None) -> torch.Tensor | None:
        """Hidden states of all tokens where the shape wants them. See `Model.forward` for `ranks`."""
        self.inputs.fill(shape)
        buffers, batch = self.inputs.of(shape), self.tables.batch(shape.num_seqs)
        wanted = None if shape.is_decode or shape.all_hidden else buffers.last_tokens
        hidden = self.model.forward(buffers.token_ids, self.inputs.attention(shape), self.kv, wanted, ranks)
        last = hidden[buffers.last_tokens] if shape.all_hidden else hidden
        logits = self.logits[: shape.num_seqs]
        self.model.logits(last, out=logits)
        drawn = sample_rows(logits, self.tables.sampling.tensor, batch.rows, buffers.seq_lens)
        store_tokens(drawn, self.tables.step, batch, buffers, self.mailbox)
        return hidden if shape.all_hidden else None


class CapturedSteps:
    """Steps of fixed sizes that were recorded once; any other size runs eagerly."""

    def __init__(self, step: Step, shapes: CapturedShapes, queue: Queue) -> None:
        self._step = step
        self._shapes = shapes
        self._queue = queue
        self._replays: dict[StepShape, Callable[[], object]] = {}
        self.num_replays = self.num_eager = 0

    def capture_all(self) -> None:
        """Comes after a rehearsal: what a capture launches for the first time, it compiles and loads."""
        for shape in self._shapes.largest_first():
            self._replays[shape] = self._queue.capture(functools.partial(self._step, shape))

    @property
    def padding(self) -> StepShape:
        """Of a step of nothing but padding, where no captured one serves."""
        return self._shapes.padding

    def fitting(self, sizes: Sequence[StepSize], alone: int) -> StepShape | None:
        """The smallest captured size that serves the steps of all ranks; None where none does.

        `alone`: tokens of this rank's sequence, where it has one only.
        """
        if any(size.all_hidden for size in sizes):
            return None
        num_seqs, num_tokens = max(size.num_seqs for size in sizes), max(size.num_tokens for size in sizes)
        decode = all(size.num_seqs == size.num_tokens for size in sizes)
        shape = self._shapes.decode(num_seqs, alone) if decode else self._shapes.chunks(num_seqs, num_tokens)
        return shape if shape in self._replays else None

    def rows_of_ranks(self, sizes: Sequence[StepSize]) -> RankRows:
        """In a step that each rank runs eagerly, at the captured size that would serve it, if one would."""
        rows = []
        for size in sizes:
            shape = self.fitting([size], 0)  # as many rows for sequences of any length
            if shape is not None:
                rows.append((shape.num_tokens, shape.num_seqs))
            else:
                rows.append((size.num_tokens, size.num_tokens if size.all_hidden else size.num_seqs))
        tokens, wanted = zip(*rows, strict=True)
        return RankRows(tokens, wanted)

    def run(self, shape: StepShape, ranks: RankRows | None = None) -> torch.Tensor | None:
        """Hidden states of all tokens where the shape wants them.

        With `ranks`, the ranks' steps differ, and none of them is replayed.
        """
        replay = self._replays.get(shape) if ranks is None else None
        if replay is None:
            self.num_eager += 1
            return self._step(shape, ranks)
        self.num_replays += 1
        replay()
        return None

"""One step of a plan, run in the same order on every device."""

from __future__ import annotations

import torch

from ..core.step import GroupStep, PendingStep, StepPlan, StepResult
from ..layers.step_context import RankRows
from .backends import Backend, CapturedSteps, DraftModel, Model, StepParts
from .batch import Batch, CurrentBatch
from .inputs import InputBuffers
from .outputs import FinishedStep, StepOutputs
from .sampling import LogitsProcessors
from .shapes import StepLimits, StepShape
from .tables import CacheArenas, RowTables


class ModelRunner:
    """Runs one model on one device. Implements `engine.core.step.Runner`.

    Nothing else may write blocks of `arenas` that a step uses; transfers fill others.
    """

    def __init__(
        self,
        model: Model,
        arenas: CacheArenas,
        backend: Backend,
        limits: StepLimits,
        vocab_size: int,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.model = model
        self.arenas = arenas
        self.backend = backend
        self.limits = limits
        memory = backend.zeros(RowTables.num_values(limits, arenas))
        self.writes = backend.table_writes(memory)
        self.tables = RowTables(memory, self.writes, limits, arenas)
        self.inputs = InputBuffers(self.tables, arenas, limits)
        self.current = CurrentBatch(self.tables, self.writes)
        self.processors = LogitsProcessors(self.tables, limits, vocab_size)
        pages = backend.pinned((StepOutputs.NUM_PAGES, limits.max_num_draws), torch.int32)
        self.outputs = StepOutputs(pages, backend.device, backend.event)
        self.step = backend.make_step(
            StepParts(
                model=model,
                draft_model=draft_model,
                tables=self.tables,
                current=self.current,
                inputs=self.inputs,
                outputs=self.outputs,
                processors=self.processors,
                limits=limits,
                vocab_size=vocab_size,
            )
        )
        self.captured = CapturedSteps(self.step, backend.shapes)
        backend.synchronize()  # the tables were filled outside the order of the steps

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size of step, and the kernels that change tables. Call it before the first plan."""
        with self.backend.in_order():
            self.captured.capture_all()
            self.writes.capture()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Apply the plan's changes and launch its chunks. On a GPU, it returns before they have run."""
        with self.backend.in_order():
            self._update_rows(plan)
            if not plan.chunks and plan.group is None:
                self.writes.flush()
                return FinishedStep(StepResult(plan.step, []))
            batch = Batch.of(plan.chunks, self.step.known_starts(plan.chunks))
            shape, ranks = self._shape(batch, plan.group)
            self.current.set(batch, shape, plan.num_guesses, plan.reads_from)
            self.inputs.set(batch, shape)
            self.writes.flush()
            self.outputs.free_page()
            hidden = self.captured.run(shape, ranks)
            self.step.draw(batch, shape, hidden)
            logprobs = self.processors.logprobs(batch, self.step, hidden)
            if self.limits.guesses_on_device:
                self.step.guess(shape, plan.num_guesses if plan.group is None else plan.group.num_guesses, ranks)
            return self.outputs.send(plan.step, batch.num_draws, logprobs)

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self.processors.free(row)
        for start in plan.started_rows:
            self.tables.start(start)
            self.processors.start(start)
        self.processors.mask(plan.masks)
        self.tables.append_blocks(plan.chunks)

    def _shape(self, batch: Batch, group: GroupStep | None) -> tuple[StepShape, RankRows | None]:
        """Return the smallest captured shape that serves this step on all ranks that run it, or the step's own.

        In the second case each rank runs eagerly, and needs the numbers of rows of the other ranks.
        """
        sizes = [batch.size] if group is None else group.sizes
        shape = self.captured.fitting(sizes, single_seq_len=batch.single_seq_len)
        if shape is not None:
            return shape, None
        if group is None:
            return self._own_shape(batch), None
        shape = self.captured.fitting([batch.size], single_seq_len=batch.single_seq_len)
        shape = shape or self._own_shape(batch)
        return shape, self.captured.rows_of_ranks(sizes)

    def _own_shape(self, batch: Batch) -> StepShape:
        shapes = self.backend.shapes
        return batch.exact_shape(shapes.num_wanted(batch.size)) if batch.rows else shapes.padding

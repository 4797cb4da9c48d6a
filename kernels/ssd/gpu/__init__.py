"""Mamba-2's recurrence on a GPU.

    decodes     `step`: one kernel, which reads and writes each state once
    others      `time_steps`: dt, and its sums over each chunk, for all chunks in parallel;
                then `scan`: the states from chunk to chunk, with outputs and checkpoints; in segments of sequences,
                whose states `sum_segments` computes before, if heads and sequences are few

`time_steps` passes two float32 per token and head to `scan`. Only requested states (targets and checkpoints) are
written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels import pdl
from baton.kernels.launch import cdiv
from baton.kernels.state_batch import CHUNK, StateBatch
from baton.kernels.tuned import Options

from ..time_steps import SSDDrafts, TimeSteps
from .options import SUMS, SSDShape, scan_options, step_options
from .scan import scan_chunks, sum_segments
from .step import step_tokens
from .time_steps import FACTORS, sum_time_steps

__all__ = ["ssd"]

LINE_BYTES = 128


def ssd(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    time_steps: TimeSteps,
    state: Tensor,
    batch: StateBatch,
    *,
    skip: Tensor | None = None,
    drafts: SSDDrafts | None = None,
    out: Tensor | None = None,
    step: Options | None = None,
    scan: Options | None = None,
) -> Tensor:
    """See `baton.kernels.ssd.ssd`. `step` and `scan` replace the tuned options."""
    num_tokens, num_heads, head_dim = x.shape
    shape = SSDShape(num_heads, num_heads // b.shape[1], head_dim, b.shape[2])
    out = batch.empty_like(x) if out is None else out
    operands = _Operands(x, b, c, time_steps, state, batch, skip, out, shape)
    if batch.most_decodes:
        operands.run_decodes(drafts, step or step_options(shape, batch.most_decodes, x.device))
    if batch.num_chunks:
        operands.run_chunks(scan or scan_options(shape, batch.most_prefills, num_tokens, x.dtype, x.device))
    return out


@dataclass(frozen=True)
class _Operands:
    """The tensors of one call, and the launches with them."""

    x: Tensor
    b: Tensor
    c: Tensor
    time_steps: TimeSteps
    state: Tensor
    batch: StateBatch
    skip: Tensor | None
    out: Tensor
    shape: SSDShape

    def run_decodes(self, drafts: SSDDrafts | None, options: Options) -> None:
        shape, batch, steps, replay = self.shape, self.batch, self.time_steps, self.batch.replay
        step_tokens[(cdiv(shape.head_dim, options["VALUES"]), shape.num_heads, batch.most_decodes)](
            *(self.x, self.b, self.c),
            *(steps.raw, steps.log_rate, steps.bias),
            *(self.skip, self.state),
            *(batch.query_start, batch.sources, batch.targets, batch.num_decodes),
            self.out,
            *(drafts or (None,) * 3),
            *((None,) * 3 if replay is None else (replay.rows, replay.starts, replay.counts)),
            *(self.x.stride(0), self.b.stride(0), self.c.stride(0), steps.raw.stride(0)),
            *(self.state.stride(0), self.out.stride(0), 0 if drafts is None else drafts.x.stride(0)),
            *steps.limits,
            **self._sizes,
            NUM_PLACES=0 if replay is None else replay.num_places,
            PREFETCH=min(shape.state_dim, LINE_BYTES // self.state.element_size()) if pdl.SUPPORTED.value else 0,
            **options,
            **pdl.launch_options(),
        )

    def run_chunks(self, options: Options) -> None:
        shape, batch, steps = self.shape, self.batch, self.time_steps
        factors = self.x.new_empty((batch.num_chunks, shape.num_heads, FACTORS.value, CHUNK), dtype=torch.float32)
        sum_time_steps[(cdiv(shape.num_heads, SUMS["HEADS"]), batch.num_chunks)](
            *(steps.raw, steps.log_rate, steps.bias),
            *(batch.chunk_start, factors),
            steps.raw.stride(0),
            *steps.limits,
            NUM_HEADS=shape.num_heads,
            CHUNK=CHUNK,
            **SUMS,
            **pdl.launch_options(),
        )
        segments, parts = options["SEGMENTS"], cdiv(shape.head_dim, options["VALUES"])
        precision = "tf32x3" if self.x.dtype == torch.float32 else "tf32"
        starts, totals = None, None
        if segments > 1:
            places = (batch.most_prefills, shape.num_heads, segments)
            starts = self.state.new_empty((*places, shape.head_dim, shape.state_dim))
            totals = self.state.new_empty(places)
            sum_segments[(parts, shape.num_heads, batch.most_prefills * (segments - 1))](
                *(self.x, self.b, factors, self.state),
                *(batch.sources, batch.chunk_start, batch.checkpoints, batch.seq_chunks),
                *(starts, totals, batch.least_decodes),
                *(self.x.stride(0), self.b.stride(0), self.state.stride(0)),
                **self._sizes,
                CHUNK=CHUNK,
                PRECISION=precision,
                **options,
                **pdl.launch_options(),
            )
        scan_chunks[(parts, shape.num_heads, batch.most_prefills * segments)](
            *(self.x, self.b, self.c),
            *(factors, self.skip, self.state),
            *(batch.sources, batch.targets, batch.chunk_start, batch.checkpoints, batch.seq_chunks),
            self.out,
            *(batch.least_decodes, starts, totals),
            *(self.x.stride(0), self.b.stride(0), self.c.stride(0)),
            *(self.state.stride(0), self.out.stride(0)),
            **self._sizes,
            CHUNK=CHUNK,
            PRECISION=precision,
            **options,
            **pdl.launch_options(),
        )

    @property
    def _sizes(self) -> dict[str, int]:
        shape = self.shape
        return {
            "NUM_HEADS": shape.num_heads,
            "GROUP": shape.group,
            "HEAD_DIM": shape.head_dim,
            "STATE_DIM": shape.state_dim,
        }

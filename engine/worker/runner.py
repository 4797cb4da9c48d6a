"""Orders rows, inputs, model and sampling into one step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from baton.kernels.attention import AttentionBatch
from baton.kernels.sampling import SamplingRows, sample

from ..core.layout import BLOCK_SIZE
from ..core.messages import TokenLogprobs
from ..core.step import Chunk, ChunkResult, GroupStep, RowStart, StepPlan, StepResult, TokenMask
from ..layers.rows import RankRows
from .block_tables import BlockTables
from .inputs import StepInputs
from .logprobs import LogprobColumns, first_alternatives
from .rows import Rows
from .tapes import StepTapes


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        kv: torch.Tensor,
        wanted: torch.Tensor | None,
        ranks: RankRows | None = None,
    ) -> torch.Tensor:
        """Hidden states after the last norm of the `wanted` `[R]` int64 tokens (None: of all); writes the KV of all.

        `ranks`: how many rows the data-parallel ranks have that run this step together; None: as many as this one.
        """
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`[R, hidden] -> [R, vocab_size]`, float32 on a CPU; written to `out`, of the model's type, where given."""
        ...

    def shortened(self) -> AbstractContextManager[None]:
        """Within, a step runs each of the model's kernels, but not for every layer."""
        ...


def rows_of_ranks(group: GroupStep | None) -> RankRows | None:
    """Of each rank that runs a step together with this one."""
    if group is None:
        return None
    return RankRows(
        tokens=tuple(size.num_tokens for size in group.sizes),
        wanted=tuple(size.num_wanted for size in group.sizes),
    )


def mask_tensors(masks: Sequence[TokenMask]) -> dict[int, torch.Tensor]:
    """By row, `[ceil(vocab_size / 32)]` int32."""
    return {mask.row: torch.from_numpy(np.frombuffer(mask.words, "<i4").astype(np.int32)) for mask in masks}


@dataclass(frozen=True)
class FinishedStep:
    """A step that was computed before `launch` returned, as on a CPU, which has no queue of its own."""

    finished: StepResult

    def result(self) -> StepResult:
        return self.finished


class ModelRunner:
    """Runs one model on one CPU. Implements `engine.core.step.Runner`.

    `kv` has the shape that its layout gives. Nobody else writes blocks that a step names; transfers fill others.
    """

    def __init__(
        self,
        model: Model,
        kv: torch.Tensor,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        tapes: bool = False,
    ) -> None:
        """`tapes`: steps are recorded and made again. Not where ranks wait for each other within a step."""
        self.model = model
        self.kv = kv
        self.vocab_size = vocab_size
        self.rows = Rows(max_num_seqs, max_model_len)
        self.tables = BlockTables(max_num_seqs, -(-max_model_len // BLOCK_SIZE))
        self.sampling = SamplingRows(max_num_seqs, vocab_size, self.rows.token_tensor)
        self._tapes: StepTapes | None = None
        if tapes:
            self._tapes = StepTapes(
                lambda ids, batch, wanted: model.forward(ids, batch, kv, wanted), self.tables, max_num_seqs
            )
        self.num_logprobs: dict[int, int] = {}  # row -> how many alternatives beside each sampled token
        self.num_prompt_logprobs: dict[int, int] = {}

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> FinishedStep:
        """Applies the plan's differences, runs its chunks, samples, and keeps the sampled tokens in their rows."""
        self._update_rows(plan)
        ranks = rows_of_ranks(plan.group)
        if not plan.chunks:
            if plan.group is not None:
                padding = StepInputs.padding()
                self.model.forward(padding.token_ids, padding.attention, self.kv, padding.wanted, ranks)
            return FinishedStep(StepResult(plan.step, []))
        inputs = StepInputs.gather(plan.chunks, self.rows, self.tables)
        hidden = self._hidden(inputs, ranks)
        prompt_logprobs = self._prompt_logprobs(plan.chunks, inputs, hidden)
        results = self._sample(plan.chunks, inputs, hidden)
        for index, logprobs in prompt_logprobs.items():
            results[index] = msgspec.structs.replace(results[index], prompt_logprobs=logprobs)
        return FinishedStep(StepResult(plan.step, results))

    def _hidden(self, inputs: StepInputs, ranks: RankRows | None) -> torch.Tensor:
        if self._tapes is not None and ranks is None and (tape := self._tapes.find(inputs)):
            return tape.forward(inputs)
        return self.model.forward(inputs.token_ids, inputs.attention, self.kv, inputs.wanted, ranks)

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self.sampling.free(row)
            self.num_logprobs.pop(row, None)
            self.num_prompt_logprobs.pop(row, None)
        for start in plan.started_rows:
            self._start(start)
        for chunk in plan.chunks:
            if chunk.new_block_ids:
                self.tables.append(chunk.row, chunk.new_block_ids)
        self.sampling.mask(mask_tensors(plan.masks))

    def _start(self, start: RowStart) -> None:
        self.rows.start(start)
        self.tables.start(start.row, start.block_ids)
        self.sampling.start(
            start.row,
            start.sampling,
            seed=start.seed,
            prompt_len=len(start.prompt_token_ids),
            stop_token_ids=start.stop_token_ids,
        )
        if start.sampling.logprobs is not None:
            self.num_logprobs[start.row] = start.sampling.logprobs
        if start.sampling.prompt_logprobs is not None:
            self.num_prompt_logprobs[start.row] = start.sampling.prompt_logprobs

    def _prompt_logprobs(
        self, chunks: Sequence[Chunk], inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """By index of the chunk: the logprobs of the prompt tokens that follow the chunk's own."""
        found = {}
        for index, chunk in enumerate(chunks):
            if not chunk.prompt_logprobs:
                continue
            first = int(inputs.wanted_ends[index]) - chunk.num_tokens
            targets = self.rows.prompt_after(chunk.row, chunk.start, chunk.num_tokens)
            columns = LogprobColumns.in_pieces(
                hidden[first : first + len(targets)],
                targets,
                self.num_prompt_logprobs[chunk.row],
                self.model.logits,
                self.vocab_size,
            )
            found[index] = columns.entries()
        return found

    def _sample(self, chunks: Sequence[Chunk], inputs: StepInputs, hidden: torch.Tensor) -> list[ChunkResult]:
        """Draws the next token of every chunk that samples and appends it to its row."""
        sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
        if not sampling:
            return [ChunkResult(None)] * len(chunks)
        rows, ends = inputs.rows[sampling], inputs.ends[sampling]
        if len(sampling) < len(hidden):
            hidden = hidden[torch.from_numpy(inputs.wanted_ends[sampling] - 1)]
        logits = self.model.logits(hidden)
        tokens = sample(logits, self.sampling.batch(rows.tolist(), ends.tolist()))
        self.rows.write(rows, ends, tokens.numpy())
        logprobs = self._logprobs(rows, logits, tokens) if self.num_logprobs else {}
        drawn = [ChunkResult(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]
        if len(drawn) == len(chunks):
            return drawn
        results = [ChunkResult(None)] * len(chunks)
        for index, result in zip(sampling, drawn, strict=True):
            results[index] = result
        return results

    def _logprobs(
        self, rows: NDArray[np.int64], logits: torch.Tensor, tokens: torch.Tensor
    ) -> dict[int, TokenLogprobs]:
        """By index of the drawn token, for the rows that asked. One kernel call serves every count of alternatives."""
        counts = {i: self.num_logprobs[row] for i, row in enumerate(rows.tolist()) if row in self.num_logprobs}
        if not counts:
            return {}
        asked = torch.tensor(list(counts))
        drawn = tokens[asked].clamp(min=0)  # of a row that drew none, nobody will see them
        entries = LogprobColumns.of(logits[asked], drawn, max(counts.values())).entries()
        return {i: first_alternatives(entry, count) for (i, count), entry in zip(counts.items(), entries, strict=True)}

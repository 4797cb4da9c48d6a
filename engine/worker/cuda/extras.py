"""What some rows ask for beyond what a captured step gives: other draws, and log probabilities.

A step draws every row by temperature and truncation. Rows with penalties, biases, masks or shut stop tokens are drawn
again, from the logits that the step left, before the next one begins. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.kernels.sampling import SamplingRows, sample
from baton.kernels.step import replace_tokens

from ...core.step import Chunk, RowStart, TokenMask
from ..logprobs import LogprobColumns
from ..runner import mask_tensors
from .outbox import NOTHING_ASKED, AskedLogprobs
from .queue import Queue
from .shapes import StepShape
from .step import Step


class Extras:
    """Keeps which rows ask for what. Free for steps in which none does."""

    def __init__(self, step: Step, queue: Queue, max_num_seqs: int, vocab_size: int) -> None:
        self._step = step
        self._queue = queue
        self._vocab_size = vocab_size
        self._sampling = SamplingRows(max_num_seqs, vocab_size, step.tables.tokens.tensor)
        self._num_logprobs: dict[int, int] = {}  # row -> how many alternatives beside each sampled token
        self._num_prompt_logprobs: dict[int, int] = {}
        self._prompt_lens: dict[int, int] = {}

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        row, params = start.row, start.sampling
        self._sampling.start(
            row, params, seed=start.seed, prompt_len=len(start.prompt_token_ids), stop_token_ids=start.stop_token_ids
        )
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        if params.prompt_logprobs is not None:
            self._num_prompt_logprobs[row] = params.prompt_logprobs
            self._prompt_lens[row] = len(start.prompt_token_ids)

    def mask(self, masks: Sequence[TokenMask]) -> None:
        """What rows with a grammar may draw in the step to come."""
        self._sampling.mask(mask_tensors(masks))

    def free(self, row: int) -> None:
        self._sampling.free(row)
        for asked in (self._num_logprobs, self._num_prompt_logprobs, self._prompt_lens):
            asked.pop(row, None)

    def redraw(self, shape: StepShape, rows: Sequence[int], ends: Sequence[int], samples: Sequence[bool]) -> None:
        """Draws those rows again whose logits are edited before: `ends[i]` tokens precede the one that is drawn."""
        index = [i for i in self._sampling.edited(rows, ends) if samples[i]]
        if not index:
            return
        step, where = self._step, self._to_device(index)
        asked = self._sampling.batch([rows[i] for i in index], [ends[i] for i in index])
        drawn = sample(step.logits[where], asked)
        batch, buffers = step.tables.batch(shape.num_seqs), step.inputs.of(shape)
        replace_tokens(drawn, where, step.tables.step, batch, buffers, step.mailbox)

    def logprobs(self, chunks: Sequence[Chunk], ends: Sequence[int], hidden: torch.Tensor | None) -> AskedLogprobs:
        """Of the tokens that the step drew, and of the prompts in it, whose `hidden` states are those of all tokens."""
        if not self._num_logprobs and hidden is None:
            return NOTHING_ASKED
        counts = {
            i: self._num_logprobs[chunk.row]
            for i, chunk in enumerate(chunks)
            if chunk.samples and chunk.row in self._num_logprobs
        }
        prompts = {} if hidden is None else self._of_prompts(chunks, hidden)
        if not counts and not prompts:
            return NOTHING_ASKED
        sampled = self._of_sampled(counts, chunks, ends) if counts else None
        return AskedLogprobs(sampled, counts, prompts)

    def _of_sampled(self, counts: dict[int, int], chunks: Sequence[Chunk], ends: Sequence[int]) -> LogprobColumns:
        rows, positions = [chunks[i].row for i in counts], [ends[i] for i in counts]
        tokens = self._step.tables.tokens.tensor[self._to_device(rows), self._to_device(positions)].long()
        logits = self._step.logits[self._to_device(list(counts))]
        return LogprobColumns.of(logits, tokens, max(counts.values())).map(self._to_cpu)

    def _of_prompts(self, chunks: Sequence[Chunk], hidden: torch.Tensor) -> dict[int, LogprobColumns]:
        """By index of the chunk: those of the prompt tokens that follow the chunk's own."""
        found, first = {}, 0
        for i, chunk in enumerate(chunks):
            if chunk.prompt_logprobs:
                last = min(chunk.start + chunk.num_tokens, self._prompt_lens[chunk.row] - 1)
                targets = self._step.tables.tokens.tensor[chunk.row, chunk.start + 1 : last + 1].long()
                columns = LogprobColumns.in_pieces(
                    hidden[first : first + len(targets)],
                    targets,
                    self._num_prompt_logprobs[chunk.row],
                    self._step.model.logits,
                    self._vocab_size,
                )
                found[i] = columns.map(self._to_cpu)
            first += chunk.num_tokens
        return found

    def _to_device(self, numbers: list[int]) -> torch.Tensor:
        pinned = self._queue.pinned((len(numbers),), torch.int64)
        pinned.copy_(torch.tensor(numbers))
        return pinned.to(self._queue.device, non_blocking=True)

    def _to_cpu(self, column: torch.Tensor) -> torch.Tensor:
        pinned: torch.Tensor = self._queue.pinned(column.shape, column.dtype)
        return pinned.copy_(column, non_blocking=True)

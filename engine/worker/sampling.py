"""Logits processors and log probabilities: the sampling options beyond temperature, top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.kernels.sampling import SamplingBatch, SamplingRows

from ..core.step import RowStart, TokenMask
from .batch import Batch, Draws
from .outputs import NO_LOGPROBS, LogprobColumns, StepLogprobs
from .shapes import StepLimits
from .tables import RowTables


class StepLogits(Protocol):
    """Access to the logits of the current step, wherever they are."""

    def logits_of(self, numbers: list[int]) -> Tensor:
        """Return the logits `[len(numbers), vocab_size]` of the step's draws with these numbers."""
        ...

    def drawn(self, numbers: list[int]) -> Tensor:
        """Return the tokens `[len(numbers)]` int64 that were drawn; after a wrong draft they are arbitrary."""
        ...

    def to_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, `[R, hidden_size] -> [R, vocab_size]`."""
        ...

    def indices(self, numbers: list[int]) -> Tensor:
        """Return the numbers as int64 on the device, without waiting for it."""
        ...

    def to_host(self, column: Tensor) -> Tensor:
        """Return a copy in host memory, which may be read when the step has finished."""
        ...


class LogitsProcessors:
    """Keeps the options of requests, by row. Steps without such options cost nothing."""

    def __init__(self, tables: RowTables, limits: StepLimits, vocab_size: int) -> None:
        self._tokens = tables.tokens.tensor
        self._vocab_size = vocab_size
        self._sampling = SamplingRows(limits.max_num_seqs, vocab_size, self._tokens)
        self._num_logprobs: dict[int, int] = {}  # row -> alternatives beside each sampled token
        self._num_prompt_logprobs: dict[int, int] = {}
        self._prompt_lens: dict[int, int] = {}  # of the rows with prompt logprobs

    def start(self, start: RowStart) -> None:
        """Keep the options of a request that starts in a row."""
        row, params = start.row, start.sampling
        self._sampling.start(
            row, params, seed=start.seed, prompt_len=len(start.prompt_token_ids), stop_token_ids=start.stop_token_ids
        )
        if params.logprobs is not None:
            self._num_logprobs[row] = params.logprobs
        if params.prompt_logprobs is not None:
            self._num_prompt_logprobs[row] = params.prompt_logprobs
            self._prompt_lens[row] = len(start.prompt_token_ids)

    def free(self, row: int) -> None:
        """Forget the options of a row whose request has left it."""
        self._sampling.free(row)
        for asked in (self._num_logprobs, self._num_prompt_logprobs, self._prompt_lens):
            asked.pop(row, None)

    def mask(self, masks: Sequence[TokenMask]) -> None:
        """Set the tokens that rows with a grammar may draw in the next step: `[ceil(vocab_size / 32)]` int32 each."""
        self._sampling.mask(
            {
                (mask.row, mask.position): torch.from_numpy(np.frombuffer(mask.words, "<i4").astype(np.int32))
                for mask in masks
            }
        )

    def edited(self, draws: Draws) -> list[int]:
        """Return the numbers of the draws whose logits must be edited first: by penalties, biases, masks."""
        return self._sampling.edited(draws.rows, draws.positions)

    def of_draws(self, draws: Draws) -> SamplingBatch:
        """Return all that these draws depend on beside the logits."""
        return self._sampling.batch(draws.rows, draws.positions)

    def logprobs(self, batch: Batch, logits: StepLogits, hidden: Tensor | None) -> StepLogprobs:
        """Compute the log probabilities that this step's requests asked for, of sampled tokens and of prompts.

        `hidden`: the hidden states of the wanted tokens, in order; None if no prompt is scored.
        """
        if not self._num_logprobs and not batch.scored:
            return NO_LOGPROBS
        counts = {i: self._num_logprobs[batch.rows[i]] for i in batch.drawing if batch.rows[i] in self._num_logprobs}
        if not counts and not batch.scored:
            return NO_LOGPROBS
        prompts = self._of_prompts(batch, logits, hidden) if batch.scored and hidden is not None else {}
        sampled = self._of_sampled(batch.draws, logits, counts) if counts else None
        return StepLogprobs(sampled, counts, prompts)

    def _of_sampled(self, draws: Draws, logits: StepLogits, counts: dict[int, int]) -> LogprobColumns:
        """Compute those of all draws of the chunks in `counts`. Those of rejected draws are meaningless."""
        numbers = [number for number, chunk in enumerate(draws.chunks) if chunk in counts]
        columns = LogprobColumns.of(logits.logits_of(numbers), logits.drawn(numbers), max(counts.values()))
        return columns.map(logits.to_host)

    def _of_prompts(self, batch: Batch, logits: StepLogits, hidden: Tensor) -> dict[int, LogprobColumns]:
        """Compute, for each scored chunk, those of the prompt tokens that follow its tokens."""
        found = {}
        all_hidden = len(hidden) == batch.size.num_tokens
        first = 0
        for i, (row, start, length) in enumerate(zip(batch.rows, batch.starts, batch.lens, strict=True)):
            if i in batch.scored:
                last = min(start + length, self._prompt_lens[row] - 1)
                targets = self._tokens[row, start + 1 : last + 1].long()
                columns = LogprobColumns.in_pieces(
                    hidden[first : first + len(targets)],
                    targets,
                    self._num_prompt_logprobs[row],
                    logits.to_logits,
                    self._vocab_size,
                )
                found[i] = columns.map(logits.to_host)
            first += length if all_hidden else batch.num_wanted[i]
        return found

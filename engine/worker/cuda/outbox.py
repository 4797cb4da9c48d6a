"""Drawn tokens on their way to the CPU.

    store_tokens ──writes──> page of pinned memory        an event behind the step says when it can be read

The kernel that puts a token into its row writes it here as well, so nothing is copied. Pages are used in turn; the
device counts along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.kernels.step import OutputRing

from ...core.messages import TokenLogprobs
from ...core.step import ChunkResult, StepResult
from ..logprobs import LogprobColumns, first_alternatives
from .queue import Event, Queue

_NO_TOKEN = ChunkResult(None)


@dataclass(frozen=True)
class AskedLogprobs:
    """What beside the tokens some requests of a step want to know. All tensors are pinned, and filled by the step."""

    sampled: LogprobColumns | None  # one entry for each of `counts`
    counts: dict[int, int]  # index of the chunk -> how many alternatives
    prompts: dict[int, LogprobColumns]  # by index of the chunk


NOTHING_ASKED = AskedLogprobs(None, {}, {})


class PendingStep:
    """A step that the device works on. Implements `engine.core.step.PendingStep`."""

    def __init__(self, step: int, page: _Page, samples: Sequence[bool], asked: AskedLogprobs) -> None:
        self._step = step
        self._page = page
        self._samples = samples
        self._asked = asked
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Waits for this step and no later one; then its KV is in its blocks, too. Raises what the device raised."""
        if self._result is None:
            self._page.filled.synchronize()
            self._result = StepResult(self._step, self._read())
            self._page.reader = None
        return self._result

    def _read(self) -> list[ChunkResult]:
        tokens = self._page.tokens[: len(self._samples)].tolist()
        if self._asked is NOTHING_ASKED:
            if all(self._samples):
                return [ChunkResult(token) for token in tokens]
            return [
                ChunkResult(token) if samples else _NO_TOKEN
                for token, samples in zip(tokens, self._samples, strict=True)
            ]
        sampled = self._sampled_logprobs()
        prompts = {index: columns.entries() for index, columns in self._asked.prompts.items()}
        return [
            ChunkResult(token if samples else None, sampled.get(index), prompts.get(index))
            for index, (token, samples) in enumerate(zip(tokens, self._samples, strict=True))
        ]

    def _sampled_logprobs(self) -> dict[int, TokenLogprobs]:
        if self._asked.sampled is None:
            return {}
        return {
            index: first_alternatives(entry, count)
            for (index, count), entry in zip(self._asked.counts.items(), self._asked.sampled.entries(), strict=True)
        }


class Outbox:
    """The pages. A step whose page is to be used again, though nobody has read it, is waited for and read first."""

    NUM_PAGES = 4  # twice the steps in flight

    def __init__(self, max_num_seqs: int, queue: Queue) -> None:
        pages = queue.pinned((self.NUM_PAGES, max_num_seqs), torch.int32)
        self.mailbox = OutputRing(pages, torch.zeros(1, dtype=torch.int32, device=queue.device))
        self._pages = [_Page(page, queue.event()) for page in pages]
        self._turn = 0

    def make_room(self) -> None:
        """Call it before a step that stores tokens is ordered."""
        reader = self._pages[self._turn].reader
        if reader is not None:
            reader.result()

    def send(self, step: int, samples: Sequence[bool], asked: AskedLogprobs) -> PendingStep:
        """What has been ordered since `make_room` is the step: this is its end."""
        page = self._pages[self._turn]
        page.filled.record()
        page.reader = PendingStep(step, page, samples, asked)
        self._turn = (self._turn + 1) % self.NUM_PAGES
        return page.reader


class _Page:
    def __init__(self, tokens: torch.Tensor, filled: Event) -> None:
        self.tokens = tokens
        self.filled = filled
        self.reader: PendingStep | None = None

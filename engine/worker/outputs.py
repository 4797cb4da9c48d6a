"""Sampled tokens and log probabilities on their way to the scheduler.

    a step ──writes──> page of the ring, in host memory        an event after the step says when it can be read

The backend writes a step's tokens both to their rows and to a page of pinned memory, so that nothing is copied. Pages
are used in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from baton.kernels.logprobs import token_logprobs
from baton.kernels.step import REJECTED, OutputRing

from ..core.logprobs import Logprobs
from ..core.step import ChunkResult, StepResult

# Float32 logits are computed in pieces: those of a long prompt over a large vocabulary would take gigabytes at once.
PIECE_BYTES = 32 << 20
_PIECE_ROWS = 16  # rows of a piece are a multiple of this, so that it begins on a cache line, as kernels prefer


class Event(Protocol):
    """A point in a device's work."""

    def record(self) -> None:
        """Move the event behind everything that was launched so far."""
        ...

    def query(self) -> bool:
        """Return True if the device has passed the event, or if it was never recorded."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the event."""
        ...


@dataclass(frozen=True)
class LogprobColumns:
    """Log probabilities at R positions, as tensors."""

    token_ids: Tensor  # [R] int64
    logprobs: Tensor  # [R] float32
    ranks: Tensor  # [R] int64
    top_ids: Tensor  # [R, k] int64
    top_logprobs: Tensor  # [R, k] float32

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobColumns:
        """Compute those of `token_ids` `[R]` int64 and of the `num_top` most likely tokens, from `logits` `[R, V]`."""
        return cls(token_ids, *token_logprobs(logits, token_ids, num_top))

    @classmethod
    def in_pieces(
        cls,
        hidden: Tensor,
        token_ids: Tensor,
        num_top: int,
        to_logits: Callable[[Tensor], Tensor],
        vocab_size: int,
    ) -> LogprobColumns:
        """Compute the same as `of` from hidden states `[R, hidden_size]`, without all their logits at once."""
        rows = max(1, PIECE_BYTES // (4 * vocab_size * _PIECE_ROWS)) * _PIECE_ROWS
        pieces = [
            cls.of(to_logits(piece), targets, num_top)
            for piece, targets in zip(hidden.split(rows), token_ids.split(rows), strict=True)
        ]
        return cls(*(torch.cat(columns) for columns in zip(*(piece.columns() for piece in pieces), strict=True)))

    def columns(self) -> tuple[Tensor, ...]:
        return self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def map(self, change: Callable[[Tensor], Tensor]) -> LogprobColumns:
        """Return the columns with `change` applied to each, such as a copy to another device."""
        return LogprobColumns(*(change(column) for column in self.columns()))

    def pack(self) -> Logprobs:
        """Return the columns packed, without an object for each value. The columns must be on the CPU."""
        token_ids = torch.cat((self.token_ids[:, None], self.top_ids), dim=1).int()
        logprobs = torch.cat((self.logprobs[:, None], self.top_logprobs), dim=1)
        columns = (token_ids, logprobs, self.ranks.int())
        return Logprobs(token_ids.shape[1], *(column.numpy().tobytes() for column in columns))


@dataclass(frozen=True)
class StepLogprobs:
    """The log probabilities that requests of one step asked for, in host memory, where the step writes them."""

    sampled: LogprobColumns | None  # a position for each draw of the chunks in `counts`
    counts: dict[int, int]  # by index of the chunk: how many alternatives it asked for
    prompts: dict[int, LogprobColumns]  # by index of the chunk


NO_LOGPROBS = StepLogprobs(None, {}, {})


@dataclass(frozen=True)
class FinishedStep:
    """The result of a plan that had nothing to run."""

    finished: StepResult

    def result(self) -> StepResult:
        return self.finished


class LaunchedStep:
    """A step that runs on the device. Implements `engine.core.step.PendingStep`."""

    def __init__(self, step: int, page: _Page, num_draws: Sequence[int], logprobs: StepLogprobs) -> None:
        """`num_draws` of each chunk: its number of entries in the page, except that a chunk without draws has one."""
        self._step = step
        self._page = page
        self._num_draws = num_draws
        self._logprobs = logprobs
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        """Wait for this step, but for no later one; its KV is in its blocks then. Raises the device's error."""
        if self._result is None:
            self._page.filled.synchronize()
            self._result = StepResult(self._step, self._read())
            self._page.reader = None
        return self._result

    def _read(self) -> list[ChunkResult]:
        drawn = self._drawn()
        if self._logprobs is NO_LOGPROBS:
            return [ChunkResult(tokens) for tokens in drawn]
        sampled = self._sampled_logprobs(drawn)
        prompts = {index: columns.pack() for index, columns in self._logprobs.prompts.items()}
        return [ChunkResult(tokens, sampled.get(i), prompts.get(i)) for i, tokens in enumerate(drawn)]

    def _drawn(self) -> list[list[int]]:
        """Return the tokens of each chunk: its draws up to the first one that differs from its draft."""
        num_draws = self._num_draws
        most = max(num_draws, default=0)
        if most <= 1:
            tokens = self._page.tokens[: len(num_draws)].tolist()
            return [[token] if count else [] for token, count in zip(tokens, num_draws, strict=True)]
        ends = list(accumulate(max(count, 1) for count in num_draws))
        tokens = self._page.tokens[: ends[-1]].tolist()
        chunks = [tokens[end - count : end] for end, count in zip(ends, num_draws, strict=True)]
        return [[token for token in chunk if token != REJECTED] for chunk in chunks]

    def _sampled_logprobs(self, drawn: Sequence[Sequence[int]]) -> dict[int, Logprobs]:
        """Return those of sampled tokens by chunk, cut to what each asked for: the kernel computed the most for all."""
        if self._logprobs.sampled is None:
            return {}
        packed, row, found = self._logprobs.sampled.pack(), 0, {}
        for index, count in self._logprobs.counts.items():
            found[index] = Logprobs.join([packed.at(row + i, count + 1) for i in range(len(drawn[index]))])
            row += self._num_draws[index]
        return found


class StepOutputs:
    """Pages of tokens, used in turn. Before a page is used again, its earlier step is waited for and read."""

    NUM_PAGES = 4  # twice the steps in flight

    def __init__(self, pages: Tensor, device: torch.device, make_event: Callable[[], Event]) -> None:
        """`pages` `[NUM_PAGES, max_num_draws]` int32 is host memory that the device writes to."""
        self.ring = OutputRing(pages, torch.zeros(1, dtype=torch.int32, device=device))
        self._pages = [_Page(page, make_event()) for page in pages]
        self._turn = 0

    @property
    def tokens(self) -> Tensor:
        """The page of the step that is being launched, `[max_num_draws]` int32."""
        return self._pages[self._turn].tokens

    def free_page(self) -> None:
        """Free the next page. Call it before launching a step that stores tokens."""
        reader = self._pages[self._turn].reader
        if reader is not None:
            reader.result()

    def send(self, step: int, num_draws: Sequence[int], logprobs: StepLogprobs) -> LaunchedStep:
        """Return the step that was launched since `free_page`, with `num_draws` of each chunk.

        Nothing may be added to the step afterwards.
        """
        page = self._pages[self._turn]
        page.filled.record()
        page.reader = LaunchedStep(step, page, num_draws, logprobs)
        self._turn = (self._turn + 1) % self.NUM_PAGES
        return page.reader


class _Page:
    def __init__(self, tokens: Tensor, filled: Event) -> None:
        self.tokens = tokens
        self.filled = filled
        self.reader: LaunchedStep | None = None

"""A step plan while it is being made."""

from __future__ import annotations

from collections.abc import Sequence

from ..requests.request import Request
from ..step import Chunk, RowStart, StepPlan, TokenMask


class StepDraft:
    """Collects chunks under the token budget. Single tokens lead the plan, whenever they were added: its decodes."""

    __slots__ = (
        "_longer",
        "_longer_requests",
        "_row_starts",
        "budget",
        "shared_blocks",
        "singles",
        "singles_requests",
        "started",
        "step",
    )

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.shared_blocks: set[int] = set()  # that its chunks fill, and who is let in from now on may find
        self.started: list[Request] = []
        self.singles: list[Chunk] = []  # filled directly by the loop over decodes
        self.singles_requests: list[Request] = []
        self._row_starts: list[RowStart] = []
        self._longer: list[Chunk] = []
        self._longer_requests: list[Request] = []

    @property
    def is_empty(self) -> bool:
        return not self.singles and not self._longer

    def start(self, request: Request) -> None:
        """A request that has just got its row and blocks."""
        self.started.append(request)
        self._row_starts.append(request.row_start())
        self.add(request)

    def add(self, request: Request) -> None:
        """Plans as many of the request's next tokens as the budget allows, and counts them as done."""
        start = request.num_computed
        num_tokens = min(request.num_tokens - start, self.budget)
        samples = start + num_tokens == request.num_tokens
        wants_prompt = not request.may_skip_computed_prefix and start + 1 < request.num_prompt
        chunk = Chunk(request.row, start, num_tokens, samples, [], wants_prompt)
        chunks, requests = (
            (self.singles, self.singles_requests) if num_tokens == 1 else (self._longer, self._longer_requests)
        )
        chunks.append(chunk)
        requests.append(request)
        self.budget -= num_tokens
        request.num_computed += num_tokens
        request.num_tokens += samples
        request.last_step = self.step

    @property
    def num_prompt_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self._longer)

    def seal(self, freed_rows: list[int], *, constrained: bool) -> tuple[StepPlan, Sequence[Request]]:
        """The plan, and the request of each of its chunks. `constrained`: some of them may have a grammar.

        Nothing can be added afterwards.
        """
        chunks, requests = self.singles, self.singles_requests
        chunks += self._longer
        requests += self._longer_requests
        masks = _masks(chunks, requests) if constrained else []
        return StepPlan(self.step, freed_rows, self._row_starts, chunks, masks=masks), requests


def _masks(chunks: Sequence[Chunk], requests: Sequence[Request]) -> list[TokenMask]:
    return [
        TokenMask(chunk.row, request.take_mask())
        for chunk, request in zip(chunks, requests, strict=True)
        if chunk.samples and request.is_constrained
    ]

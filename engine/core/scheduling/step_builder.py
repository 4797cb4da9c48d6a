"""The step that is being planned, and steps in flight.

StepBuilder ──> StepPlan ──> in flight ──> taken with its result
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..kv.request_memory import RequestMemory
from ..prefix import BlockHash
from ..requests.drafting import Drafting
from ..requests.request import Request
from ..step import Chunk, RowStart, StepPlan, StepResult, TokenMask

NO_BLOCKS: list[list[int]] = []  # shared by all chunks without new blocks; never written to


class StepMismatch(Exception):
    """A result does not match the oldest step in flight: the runner broke the contract of `step.py`."""


class StepBuilder:
    """A step plan in the making: chunks within the token budget.

    Chunks of a single token, which are the decodes, lead the plan. Decodes with drafts follow, then longer chunks.
    """

    __slots__ = (
        "_drafted",
        "_drafted_requests",
        "_longer",
        "_longer_requests",
        "_memory",
        "_row_starts",
        "budget",
        "filled_blocks",
        "singles",
        "singles_requests",
        "started",
        "step",
    )

    def __init__(self, step: int, budget: int, memory: RequestMemory) -> None:
        self.step = step
        self._memory = memory
        self.budget = budget
        self.filled_blocks: set[BlockHash] = set()  # blocks that its chunks fill: later starters may have them as hits
        self.started: list[Request] = []
        self.singles: list[Chunk] = []  # `RunningRequests.plan_decodes` appends to it directly
        self.singles_requests: list[Request] = []
        self._drafted: list[Chunk] = []
        self._drafted_requests: list[Request] = []
        self._row_starts: list[RowStart] = []
        self._longer: list[Chunk] = []
        self._longer_requests: list[Request] = []

    @property
    def is_empty(self) -> bool:
        return not (self.singles or self._drafted or self._longer)

    def start(self, request: Request, row_start: RowStart, new_blocks: list[list[int]]) -> None:
        """Plan the first chunk of a request that has just been given its row and blocks.

        `row_start` has its tables without the chunk's `new_blocks`, since the chunk may read the blocks that these
        tables end with.
        """
        self.started.append(request)
        self._row_starts.append(row_start)
        self.add(request, new_blocks)

    def end_of(self, request: Request) -> int:
        """Return how many tokens of the request would be computed if it used as much of the budget as it may."""
        return self._memory.chunk_end(request, min(request.num_tokens, request.num_computed + self.budget))

    def add(self, request: Request, new_blocks: list[list[int]] = NO_BLOCKS) -> None:
        """Plan as many of the request's next tokens as the budget allows, and count them as computed."""
        start, end = request.num_computed, self.end_of(request)
        num_tokens, samples = end - start, end == request.num_tokens
        wants_prompt = not request.may_skip_computed_prefix and start + 1 < request.num_prompt
        chunk = Chunk(request.row, start, num_tokens, samples, new_blocks, wants_prompt)
        chunks, requests = (
            (self.singles, self.singles_requests) if num_tokens == 1 else (self._longer, self._longer_requests)
        )
        chunks.append(chunk)
        requests.append(request)
        self.budget -= num_tokens
        request.advance(self.step, num_tokens, samples)

    def take_decodes(self) -> list[tuple[Chunk, Request]]:
        """Remove and return the decodes. Each is to be put back with or without drafts."""
        decodes = list(zip(self.singles, self.singles_requests, strict=True))
        self.singles.clear()
        self.singles_requests.clear()
        return decodes

    def put_back(self, chunk: Chunk, request: Request) -> None:
        """Put back a decode without drafts."""
        self.singles.append(chunk)
        self.singles_requests.append(request)

    def add_drafts(
        self,
        chunk: Chunk,
        request: Request,
        num_drafts: int,
        guesses: Sequence[int],
        new_blocks: list[list[int]],
    ) -> None:
        """Plan a decode with drafts, and `new_blocks` to hold them.

        `guesses` begin after the request's last known token and reach to the last draft or further; empty if the row
        has them on the device.
        """
        blocks = _joined(chunk.new_block_ids, new_blocks)
        guesses = guesses[: request.num_computed + num_drafts - len(request.token_ids)]
        drafted = Chunk(
            chunk.row, chunk.start, 1 + num_drafts, True, blocks, num_drafts=num_drafts, drafts=tuple(guesses)
        )
        self._drafted.append(drafted)
        self._drafted_requests.append(request)
        request.advance_drafts(num_drafts)
        self.budget -= num_drafts

    @property
    def num_prompt_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self._longer)

    @property
    def num_decodes(self) -> int:
        """The number of requests that only decode."""
        return len(self.singles) + len(self._drafted)

    def seal(
        self, freed_rows: list[int], *, constrained: bool, drafting: Drafting | None = None
    ) -> tuple[StepPlan, Sequence[Request]]:
        """Return the plan, and the request of each of its chunks. Nothing can be added afterwards.

        `constrained`: some of the requests may have a grammar.
        """
        chunks, requests = self.singles, self.singles_requests
        chunks += self._drafted
        chunks += self._longer
        requests += self._drafted_requests
        requests += self._longer_requests
        masks = _masks(chunks, requests) if constrained else []
        num_guesses, reads_from = (0, None) if drafting is None else drafting.plan_guesses(chunks, requests)
        plan = StepPlan(
            self.step,
            freed_rows,
            self._row_starts,
            chunks,
            masks=masks,
            num_guesses=num_guesses,
            reads_from=reads_from,
        )
        if drafting is not None:
            drafting.planned(has_prompts=bool(self._longer), reads_late=plan.reads_late)
        return plan, requests


def _joined(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    """Return the new blocks of each group from both lists, either of which may be empty."""
    if not first or not second:
        return first or second
    return [blocks + more for blocks, more in zip(first, second, strict=True)]


def _masks(chunks: Sequence[Chunk], requests: Sequence[Request]) -> list[TokenMask]:
    """Return a mask for each draw of the requests with a grammar."""
    return [
        TokenMask(chunk.row, position, mask)
        for chunk, request in zip(chunks, requests, strict=True)
        if chunk.samples and request.is_constrained
        for position, mask in enumerate(request.take_masks(chunk.num_draws), chunk.first_draw)
    ]


class StepInFlight(NamedTuple):
    plan: StepPlan
    requests: Sequence[Request]  # the request of each chunk
    num_prompt_tokens: int
    num_decodes: int  # requests that only decode


class StepsInFlight:
    """Steps that are planned and have no result yet, oldest first. Results come in the order of the plans."""

    def __init__(self, max_num_tokens: int, memory: RequestMemory) -> None:
        self._memory = memory
        self.num_planned = 0  # steps so far; also the number of the next one
        self._max_num_tokens = max_num_tokens
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that these steps compute."""
        return sum(step.num_prompt_tokens for step in self._steps)

    def begin(self) -> StepBuilder:
        return StepBuilder(self.num_planned, self._max_num_tokens, self._memory)

    def enter(
        self, builder: StepBuilder, freed_rows: list[int], *, constrained: bool, drafting: Drafting | None = None
    ) -> StepPlan:
        """Turn the builder's step into a plan in flight. `constrained`: some of its requests may have a grammar."""
        num_decodes = builder.num_decodes
        plan, requests = builder.seal(freed_rows, constrained=constrained, drafting=drafting)
        self._steps.append(StepInFlight(plan, requests, builder.num_prompt_tokens, num_decodes))
        self.num_planned += 1
        return plan

    def take(self, result: StepResult) -> StepInFlight:
        """Remove and return the oldest step, to which this result must belong. Raises `StepMismatch`."""
        if self._steps:
            step = self._steps.popleft()
            if result.step == step.plan.step and len(result.chunks) == len(step.requests):
                return step
            expected = f"step {step.plan.step} with {len(step.requests)} chunks"
        else:
            expected = "none"
        raise StepMismatch(f"got a result of step {result.step} with {len(result.chunks)} chunks, expected {expected}")

    def forget(self) -> None:
        """Drop all steps, since no result will come."""
        self._steps.clear()

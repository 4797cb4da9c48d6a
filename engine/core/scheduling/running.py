"""Running requests, the step that is being planned for them, and the steps that are in flight.

    start ──> running ──────────────────> over
                 └─ preempted ──> waiting, with all it has drawn and nothing it has computed

When blocks run out, or a request of higher priority waits for them, the last running request in rank is preempted.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from ..kv.fence import Fence, RowPool
from ..kv.request_memory import RequestMemory
from ..kv.transfers import Transfers
from ..prefix import BlockHash
from ..requests.request import Request, RequestStatus, advance_decodes
from ..speculation.config import MAX_DRAFTED_TOKENS
from ..step import Chunk, RowStart, StepPlan, StepResult, TokenMask
from .drafting import Drafting
from .waiting import WaitingQueue

_NO_BLOCKS: list[list[int]] = []  # shared by all chunks that bring none; never written to
_rank = attrgetter("rank")


class StepMismatch(Exception):
    """A result does not fit the oldest step in flight: the runner broke the contract of `step.py`."""


class StepDraft:
    """A step plan while it is being made: chunks under the token budget.

    Single tokens lead the plan: its decodes. Those with drafts follow.
    """

    __slots__ = (
        "_drafted",
        "_drafted_requests",
        "_longer",
        "_longer_requests",
        "_row_starts",
        "budget",
        "filled_blocks",
        "singles",
        "singles_requests",
        "started",
        "step",
    )

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.filled_blocks: set[BlockHash] = set()  # by its chunks; requests that start from now on may find them
        self.started: list[Request] = []
        self.singles: list[Chunk] = []  # appended to directly by the loop over decodes
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
        """Plan the first chunk of a request that has just got its row and blocks.

        `row_start` has its tables before the chunk's `new_blocks`: the chunk may read what these name.
        """
        self.started.append(request)
        self._row_starts.append(row_start)
        self.add(request, new_blocks)

    def end_of(self, request: Request) -> int:
        """Return how far the request would be computed with as many tokens as the budget allows."""
        return min(request.num_tokens, request.num_computed + self.budget)

    def add(self, request: Request, new_blocks: list[list[int]] = _NO_BLOCKS) -> None:
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
        """Take out the decodes, to put each back with or without drafts."""
        decodes = list(zip(self.singles, self.singles_requests, strict=True))
        self.singles.clear()
        self.singles_requests.clear()
        return decodes

    def put_back(self, chunk: Chunk, request: Request) -> None:
        """Plan a decode as it was."""
        self.singles.append(chunk)
        self.singles_requests.append(request)

    def add_drafts(self, chunk: Chunk, request: Request, guesses: Sequence[int], new_blocks: list[list[int]]) -> None:
        """Plan a decode with guesses of the request's tokens from the last known one on, and blocks to hold them."""
        num_drafts = len(request.token_ids) + len(guesses) - request.num_computed
        blocks = _joined(chunk.new_block_ids, new_blocks)
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
        """Requests that only draw."""
        return len(self.singles) + len(self._drafted)

    def seal(self, freed_rows: list[int], *, constrained: bool) -> tuple[StepPlan, Sequence[Request]]:
        """Return the plan, and the request of each of its chunks; nothing can be added afterwards.

        `constrained`: some of the requests may have a grammar.
        """
        chunks, requests = self.singles, self.singles_requests
        chunks += self._drafted
        chunks += self._longer
        requests += self._drafted_requests
        requests += self._longer_requests
        masks = _masks(chunks, requests) if constrained else []
        return StepPlan(self.step, freed_rows, self._row_starts, chunks, masks=masks), requests


def _joined(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    """Return the new blocks of each group, where there are any."""
    if not first or not second:
        return first or second
    return [blocks + more for blocks, more in zip(first, second, strict=True)]


def _masks(chunks: Sequence[Chunk], requests: Sequence[Request]) -> list[TokenMask]:
    return [
        TokenMask(chunk.row, request.take_mask())
        for chunk, request in zip(chunks, requests, strict=True)
        if chunk.samples and request.is_constrained
    ]


class StepInFlight(NamedTuple):
    plan: StepPlan
    requests: Sequence[Request]  # of each of its chunks
    num_prompt_tokens: int
    num_decodes: int  # requests that only draw


class StepsInFlight:
    """Steps that are planned and have no result yet, oldest first: results come in the order of plans."""

    def __init__(self, max_num_tokens: int) -> None:
        self.num_planned = 0  # ever; also the number of the next step
        self._max_num_tokens = max_num_tokens
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that these steps compute."""
        return sum(step.num_prompt_tokens for step in self._steps)

    def draft(self) -> StepDraft:
        return StepDraft(self.num_planned, self._max_num_tokens)

    def enter(self, draft: StepDraft, freed_rows: list[int], *, constrained: bool) -> StepPlan:
        """Make the draft a plan that is in flight. `constrained`: some of its requests may have a grammar."""
        num_decodes = draft.num_decodes
        plan, requests = draft.seal(freed_rows, constrained=constrained)
        self._steps.append(StepInFlight(plan, requests, draft.num_prompt_tokens, num_decodes))
        self.num_planned += 1
        return plan

    def take(self, result: StepResult) -> StepInFlight:
        """Remove and return the oldest step, whose result this is. Raises `StepMismatch`."""
        if self._steps:
            step = self._steps.popleft()
            if result.step == step.plan.step and len(result.chunks) == len(step.requests):
                return step
            expected = f"step {step.plan.step} with {len(step.requests)} chunks"
        else:
            expected = "none"
        raise StepMismatch(f"got a result of step {result.step} with {len(result.chunks)} chunks, expected {expected}")

    def forget(self) -> None:
        """Drop all steps: no result will come."""
        self._steps.clear()


class RunningRequests:
    """Running requests by rank. Decoding ones get a token of each step; the others share what is left of its budget."""

    def __init__(
        self,
        rows: RowPool,
        memory: RequestMemory,
        fence: Fence,
        transfers: Transfers,
        waiting: WaitingQueue,
        drafting: Drafting | None = None,
    ) -> None:
        self.num_preemptions = 0
        self.lacks_blocks = False  # a running request does in this step, so no waiting one gets any
        self._rows = rows
        self._memory = memory
        self._fence = fence
        self._transfers = transfers
        self._waiting = waiting
        self._drafting = drafting
        self._by_rank: list[Request] = []
        self._reading: list[Request] = []  # requests of the newest step that may have more of their prompts left

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_rank)

    @property
    def has_room(self) -> bool:
        """Return whether a row is free."""
        return self._rows.num_free > 0

    @property
    def num_unread_tokens(self) -> int:
        """Tokens that are left of prompts which are read in several steps."""
        running = (each for each in self._reading if each.status is RequestStatus.RUNNING)
        left = (each.num_tokens - each.num_computed for each in running)
        return sum(count for count in left if count > 1)  # 1: the token that is being drawn

    def start(self, request: Request, draft: StepDraft) -> None:
        """Give a request that has its blocks a row, and plan its first chunk."""
        request.move_to(RequestStatus.RUNNING)
        request.row = self._rows.take()
        insort(self._by_rank, request, key=_rank)
        row_start, new_blocks = request.row_start(), _NO_BLOCKS
        if self._memory.has_states:  # its own slots are new: nobody else reads them
            new_blocks = self._memory.extend_states(request, draft.end_of(request))
        draft.start(request, row_start, new_blocks)
        self._reading.append(request)
        self._chunk_planned(request, draft)

    def remove(self, request: Request) -> None:
        """Remove a request that runs."""
        self._by_rank.remove(request)

    def remove_ended(self) -> None:
        running = RequestStatus.RUNNING
        self._by_rank = [request for request in self._by_rank if request.status is running]

    # -------------------------------------------------------------------------------- shares of a step

    def decode(self, draft: StepDraft, *, may_start: bool = False) -> list[Request]:
        """Plan one token for each request that has one left to compute. Returns the others, which have more.

        The budget suffices, since it is never less than the number of rows. `may_start`: requests wait that could start
        in this step.
        """
        self.lacks_blocks = False
        prefills = []
        chunks, requests = draft.singles, draft.singles_requests
        for request in self._by_rank:  # preemption removes only requests that come later
            start = request.num_computed
            if request.num_tokens - start != 1:
                prefills.append(request)
                continue
            if start + 1 >= request.horizon:  # its last token is on the way, or one that its grammar must see first
                continue
            new_blocks = _NO_BLOCKS
            if start >= request.capacity:
                new_blocks = self._grow(request, draft)
                if not new_blocks:
                    continue
            chunks.append(Chunk(request.row, start, 1, True, new_blocks))
            requests.append(request)
        advance_decodes(requests, draft.step)
        draft.budget -= len(chunks)
        if self._drafting is not None:
            unread = sum(request.num_tokens - request.num_computed for request in prefills)
            if self._drafting.begin_step(len(chunks), min(unread, draft.budget), may_start=may_start):
                self._add_drafts(self._drafting, draft)
        self._reading = prefills.copy()
        return prefills

    def _add_drafts(self, drafting: Drafting, draft: StepDraft) -> None:
        """Let decodes have drafts, as far as budget, blocks and the requests' lengths go.

        A block is taken for them only where one is free.
        """
        decodes = draft.take_decodes()
        spare = min(draft.budget, MAX_DRAFTED_TOKENS - len(decodes))
        for chunk, request in decodes:
            num_known, num_computed, new_blocks = len(request.token_ids), request.num_computed, _NO_BLOCKS
            room = min(spare, request.limit - 1 - num_computed)
            guesses = drafting.propose(request, room) if room > 0 and drafting.may_draft(request) else ()
            if num_known + len(guesses) > request.capacity:
                new_blocks = self._memory.grow(request)
                guesses = guesses[: request.capacity - num_known]
            if num_known + len(guesses) > num_computed:
                spare -= num_known + len(guesses) - num_computed
                draft.add_drafts(chunk, request, guesses, new_blocks)
            else:
                draft.put_back(chunk, request)

    def read_on(self, prefills: list[Request], draft: StepDraft, kept: int = 0) -> None:
        """Plan as much of their prompts as the budget allows, in order, and leave `kept` tokens of it."""
        draft.budget -= kept
        for request in prefills:
            if not draft.budget:
                break
            new_blocks = _NO_BLOCKS
            if self._memory.has_states:
                new_blocks = self._memory.extend_states(request, draft.end_of(request))
                if not new_blocks:
                    continue
            draft.add(request, new_blocks)
            self._chunk_planned(request, draft)
        draft.budget += kept

    def _chunk_planned(self, request: Request, draft: StepDraft) -> None:
        """Let other requests find the blocks that the chunk fills, and give back those behind windows."""
        draft.filled_blocks.update(self._memory.register(request))
        if self._memory.gives_back:
            self._give_back_behind(request)

    def _give_back_behind(self, request: Request) -> None:
        for group, blocks in self._memory.give_back_behind(request):
            self._fence.retire_behind(group, blocks, request.last_step)

    # -------------------------------------------------------------------------------- preemption

    def preempt_for(self, head: Request) -> None:
        """Preempt requests of lower priority where the head of the queue lacks only their blocks.

        None is preempted in vain: held or arriving KV may keep so much that the head would not fit all the same.
        """
        if self._fence.closed or not (self.has_room or head.awaits_transfer):
            return
        if not self._by_rank or self._by_rank[-1].priority <= head.priority:
            return
        lower = [each for each in self._by_rank if each.priority > head.priority and self._is_preemptible(each)]
        if not self._memory.fits(head, without=lower):
            return
        while lower and not self._fence.closed and not self._memory.fits(head):
            self.preempt(lower.pop())

    def _is_preemptible(self, request: Request) -> bool:
        """Return whether its blocks would be free soon after a preemption; blocks on offer wait for their reader."""
        return request.has_unplanned_tokens and not self._transfers.grows(request)

    def _grow(self, request: Request, draft: StepDraft) -> list[list[int]]:
        """Return one more block in each group; none where the request has to sit this step out."""
        if self._memory.gives_back:
            self._give_back_behind(request)
        while not (new_blocks := self._memory.grow(request)):
            self.lacks_blocks = True
            behind = all(self._fence.brings_back(group) for group in self._memory.dry_groups(request))
            if self._fence.closed or behind or self._transfers.any_asked_back:  # blocks are on their way back
                return []
            last = self._last_in_rank()
            if last is not None and last is not request:
                self.preempt(last)
                continue
            # No request before it needs its blocks, so it keeps them while others run.
            nothing_in_flight = self._fence.has_passed(draft.step - 1)
            if draft.is_empty and nothing_in_flight:
                self.preempt(request)
                self.lacks_blocks = False
            return []
        return new_blocks

    def _last_in_rank(self) -> Request | None:
        """Return the next to be preempted. One whose last token is on the way gives its blocks back anyway."""
        return next((request for request in reversed(self._by_rank) if request.has_unplanned_tokens), None)

    def preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._by_rank.remove(request)
        request.move_to(RequestStatus.PREEMPTED)
        self._transfers.give_up_early(request)
        self._fence.retire(*request.give_up_memory(), request.last_step)
        self._waiting.push(request)

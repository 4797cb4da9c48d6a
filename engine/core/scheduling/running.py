"""Requests that have a row and blocks: their share of each step, and who gives way when blocks run out.

    start ──> running ──────────────────> over
                 └─ preempted ──> waiting, with all it has drawn and nothing it has computed

The last in rank gives way, when one before it needs a block or one of higher priority waits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from ..kv.fence import Fence, RowPool
from ..kv.memory import RequestMemory
from ..kv.transfers import Transfers
from ..requests.request import Request, RequestStatus
from ..step import Chunk
from .draft import StepDraft
from .queue import WaitingQueue

_NO_BLOCKS: list[int] = []  # shared by all chunks that bring none; never written to
_rank = attrgetter("rank")


class RunningRequests:
    """By rank. Who draws gets one token of each step; who still reads, what is left of the step's budget."""

    def __init__(
        self, rows: RowPool, memory: RequestMemory, fence: Fence, transfers: Transfers, waiting: WaitingQueue
    ) -> None:
        self.num_preemptions = 0
        self.lacks_blocks = False  # one of them does in this step: nobody new gets any
        self._rows = rows
        self._memory = memory
        self._fence = fence
        self._transfers = transfers
        self._waiting = waiting
        self._by_rank: list[Request] = []
        self._reading: list[Request] = []  # those of the newest step that may have more of their prompts left

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_rank)

    @property
    def has_room(self) -> bool:
        """A row is free."""
        return self._rows.num_free > 0

    @property
    def num_unread_tokens(self) -> int:
        """What is left of prompts that are read in several steps."""
        running = (each for each in self._reading if each.status is RequestStatus.RUNNING)
        left = (each.num_tokens - each.num_computed for each in running)
        return sum(count for count in left if count > 1)  # 1: the token that is being drawn

    def start(self, request: Request, draft: StepDraft) -> None:
        """It has its blocks; now it has a row, and its first chunk."""
        request.move_to(RequestStatus.RUNNING)
        request.row = self._rows.take()
        insort(self._by_rank, request, key=_rank)
        draft.start(request)
        self._reading.append(request)
        draft.shared_blocks.update(self._memory.register(request))

    def remove(self, request: Request) -> None:
        """One of these."""
        self._by_rank.remove(request)

    def remove_ended(self) -> None:
        running = RequestStatus.RUNNING
        self._by_rank = [request for request in self._by_rank if request.status is running]

    # -------------------------------------------------------------------------------- shares of a step

    def decode(self, draft: StepDraft) -> list[Request]:
        """One token for each request that has one left to compute. Returns the others, which have more.

        The budget suffices, since it is never less than the number of rows.
        """
        self.lacks_blocks = False
        prefills = []
        step, chunks, requests = draft.step, draft.singles, draft.singles_requests
        for request in self._by_rank:  # preemption removes only requests that come later
            start = request.num_computed
            if request.num_tokens - start != 1:
                prefills.append(request)
                continue
            end = start + 1
            if end >= request.horizon:  # its last token is on the way, or one that its grammar must see first
                continue
            new_blocks = _NO_BLOCKS
            if start >= request.capacity:
                new_blocks = self._grow(request, draft)
                if not new_blocks:
                    continue
            chunks.append(Chunk(request.row, start, 1, True, new_blocks))
            requests.append(request)
            request.num_computed = end
            request.num_tokens = end + 1
            request.last_step = step
        draft.budget -= len(chunks)
        self._reading = prefills.copy()
        return prefills

    def read_on(self, prefills: list[Request], draft: StepDraft) -> None:
        """As much of their prompts as the budget allows, in order."""
        for request in prefills:
            if not draft.budget:
                return
            draft.add(request)
            draft.shared_blocks.update(self._memory.register(request))

    # -------------------------------------------------------------------------------- who gives way

    def make_way_for(self, head: Request) -> None:
        """Where only blocks are missing for the head of the queue, requests of lower priority give up theirs.

        None does in vain: held or arriving KV may keep so much that the head would not fit, and everyone would wait.
        """
        if self._fence.closed or not (self.has_room or head.awaits_transfer):
            return
        if not self._by_rank or self._by_rank[-1].priority <= head.priority:
            return
        lower = [each for each in self._by_rank if each.priority > head.priority and self._gives_way(each)]
        if not self._memory.fits(head, without=lower):
            return
        while lower and not self._fence.closed and not self._memory.fits(head):
            self.preempt(lower.pop())

    def _gives_way(self, request: Request) -> bool:
        """Its blocks would be free soon after it was preempted; what is on offer waits for its reader."""
        return request.has_unplanned_tokens and not self._transfers.grows(request)

    def _grow(self, request: Request, draft: StepDraft) -> list[int]:
        """One more block; none where the request has to sit this step out."""
        while not (new_blocks := self._memory.grow(request)):
            self.lacks_blocks = True
            if self._fence.closed or self._transfers.any_asked_back:  # blocks are on their way back
                return []
            last = self._last_in_rank()
            if last is not None and last is not request:
                self.preempt(last)
                continue
            # Nobody before it needs its blocks, so it keeps them while others run. Alone, it must not block the queue.
            nothing_in_flight = self._fence.has_passed(draft.step - 1)
            if draft.is_empty and nothing_in_flight:
                self.preempt(request)
                self.lacks_blocks = False
            return []
        return new_blocks

    def _last_in_rank(self) -> Request | None:
        """The next to be preempted. Requests whose last token is on the way give their blocks back anyway."""
        return next((request for request in reversed(self._by_rank) if request.has_unplanned_tokens), None)

    def preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._by_rank.remove(request)
        request.move_to(RequestStatus.PREEMPTED)
        self._transfers.give_up_early(request)
        self._fence.retire(*request.give_up_memory(), request.last_step)
        self._waiting.push(request)

"""Running requests: their parts of a step, and preemption.

Requests run in the order of the waiting queue: by priority, then by arrival. Each gets its part of a step. When blocks
run out, or a request of higher priority needs them, the last running request in this order is preempted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from ..kv.fence import Fence
from ..kv.request_memory import RequestMemory
from ..kv.table_starts import Shortage
from ..kv.transfers import Transfers
from ..requests.drafting import NO_DRAFTS, Drafting
from ..requests.request import Request, RequestStatus, advance_decodes
from ..speculation.config import MAX_DRAFTED_TOKENS
from ..step import Chunk
from .queues import QUEUE_ORDER, WaitingQueue
from .step_builder import NO_BLOCKS, StepBuilder


class RunningRequests:
    """Running requests by `queue_key`. In a step each decoding one gets a token; the others share the rest."""

    def __init__(
        self,
        memory: RequestMemory,
        fence: Fence,
        transfers: Transfers,
        waiting: WaitingQueue,
        drafting: Drafting | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        """Create it. `overlaps`: steps are planned while others are in flight."""
        self.num_preemptions = 0
        self.lacks_blocks = False  # a running request lacks blocks in this step, so no waiting one gets any
        self._memory = memory
        self._fence = fence
        self._transfers = transfers
        self._waiting = waiting
        self._drafting = drafting
        self._overlaps = overlaps
        self._by_queue_key: list[Request] = []
        self._shortage: Shortage | None = None  # of the head of the queue, so that it is not counted in every step
        self._reading: list[Request] = []  # requests of the newest step that may have more of their prompts to read

    def __len__(self) -> int:
        return len(self._by_queue_key)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_queue_key)

    @property
    def num_free_rows(self) -> int:
        return self._fence.rows.num_free

    @property
    def has_free_row(self) -> bool:
        return self._fence.rows.num_free > 0

    @property
    def num_unread_tokens(self) -> int:
        """The tokens still to compute of prompts that are read in several steps."""
        running = (each for each in self._reading if each.status is RequestStatus.RUNNING)
        left = (each.num_tokens - each.num_computed for each in running)
        return sum(count for count in left if count > 1)  # 1: the token that is being drawn

    def start(self, request: Request, builder: StepBuilder) -> None:
        """Give a request that has its blocks a row, and plan its first chunk."""
        request.move_to(RequestStatus.RUNNING)
        request.row = self._fence.rows.take()
        insort(self._by_queue_key, request, key=QUEUE_ORDER)
        if self._shortage is not None and request.priority > self._shortage.priority:
            self._shortage = None  # its blocks may have been loading: then they did not count as releasable
        row_start, new_blocks = request.row_start(), NO_BLOCKS
        if self._memory.has_states:  # its slots are new, so no other request reads them
            new_blocks = self._memory.extend_states(request, builder.end_of(request))
        builder.start(request, row_start, new_blocks)
        self._reading.append(request)
        self._chunk_planned(request, builder)

    def remove(self, request: Request) -> None:
        """Remove a running request."""
        self._by_queue_key.remove(request)

    def remove_ended(self) -> None:
        running = RequestStatus.RUNNING
        self._by_queue_key = [request for request in self._by_queue_key if request.status is running]

    # -------------------------------------------------------------------------------- shares of a step

    def plan_decodes(self, builder: StepBuilder, *, num_waiting: int = 0) -> list[Request]:
        """Plan one token for each request that has exactly one left to compute. Returns the others, which have more.

        The budget suffices, since it is never less than the number of rows. `num_waiting` requests may start in this
        step, as far as there are rows for them.
        """
        self.lacks_blocks = False
        prefills = []
        chunks, requests = builder.singles, builder.singles_requests
        for request in self._by_queue_key:  # preemption removes only requests that come later
            start = request.num_computed
            if request.num_tokens - start != 1:
                prefills.append(request)
                continue
            if start + 1 >= request.horizon:  # its last token is planned, or a token must be known before it continues
                continue
            new_blocks = NO_BLOCKS
            if start >= request.capacity:
                new_blocks = self._grow(request, builder)
                if not new_blocks:
                    continue
            chunks.append(Chunk(request.row, start, 1, True, new_blocks))
            requests.append(request)
        if self._memory.has_states and not chunks and num_waiting:
            self._preempt_waiting_for_slots(builder, prefills)
        advance_decodes(requests, builder.step)
        builder.budget -= len(chunks)
        if self._drafting is not None:
            unread = sum(request.num_tokens - request.num_computed for request in prefills)
            if self._drafting.begin_step(len(chunks), min(unread, builder.budget)):
                num_others = len(prefills) + min(num_waiting, self._fence.rows.num_free)
                self._add_drafts(self._drafting, builder, num_others)
        self._reading = prefills.copy()
        return prefills

    def _add_drafts(self, drafting: Drafting, builder: StepBuilder, num_others: int) -> None:
        """Give drafts to decodes, as far as budget, blocks, checkpoints and the requests' lengths allow.

        Drafts, and the guesses made after them, get a new block only if one is free, and only for tokens that the
        request can have. `num_others` is the most other requests that the step may have: their draws need memory, too,
        and half of the budget is left to them.
        """
        decodes = builder.take_decodes()
        budget = builder.budget // 2 if num_others else builder.budget
        spare = min(budget, MAX_DRAFTED_TOKENS - len(decodes) - num_others)
        for chunk, request in decodes:
            num_computed, new_blocks = request.num_computed, NO_BLOCKS
            room = min(spare, request.limit - 1 - num_computed)
            if self._memory.has_states:
                room = min(room, self._memory.room_for_drafts(request))
            sits_out = self._overlaps and drafting.must_settle(request)
            drafts = drafting.propose(request, room, sits_out=sits_out) if room > 0 else NO_DRAFTS
            num_drafts = drafts.num_drafts
            if num_drafts and min(num_computed + num_drafts + drafting.num_behind, request.limit) > request.capacity:
                new_blocks = self._memory.grow(request)
                num_drafts = min(num_drafts, request.capacity - num_computed)
            if num_drafts > 0:
                spare -= num_drafts
                builder.add_drafts(chunk, request, num_drafts, drafts.guesses, new_blocks)
                if sits_out:
                    request.sit_out()
            else:
                builder.put_back(chunk, request)

    def plan_prefills(self, prefills: list[Request], builder: StepBuilder, reserved: int = 0) -> None:
        """Plan the next chunks of these prompts, in order, as far as the budget allows without `reserved` tokens."""
        builder.budget -= reserved
        for request in prefills:
            if not builder.budget:
                break
            new_blocks = NO_BLOCKS
            if self._memory.has_states:
                new_blocks = self._memory.extend_states(request, builder.end_of(request))
                if not new_blocks:
                    continue
            builder.add(request, new_blocks)
            self._chunk_planned(request, builder)
        builder.budget += reserved

    def _chunk_planned(self, request: Request, builder: StepBuilder) -> None:
        """Let other requests find the blocks that the chunk fills, and give back blocks behind windows."""
        builder.filled_blocks.update(self._memory.register(request))
        if self._memory.gives_back:
            self._give_back_behind(request)

    def _give_back_behind(self, request: Request) -> None:
        for group, blocks in self._memory.give_back_behind(request):
            self._fence.retire_behind(group, blocks, request.last_step)

    # -------------------------------------------------------------------------------- preemption

    def preempt_for(self, head: Request) -> None:
        """Preempt requests of lower priority if their blocks are all that the head of the queue lacks.

        If held or arriving KV takes so much that the head would not fit all the same, nothing is preempted.
        """
        if self._fence.has_retired_requests or not (self.has_free_row or head.awaits_transfer):
            return
        if not self._by_queue_key or self._by_queue_key[-1].priority <= head.priority:
            return
        if self._shortage is not None and self._memory.shortage_persists(self._shortage, head):
            return
        self._shortage = None
        if self._memory.fits(head):
            return
        lower = [each for each in self._by_queue_key if each.priority > head.priority]
        self._shortage = self._memory.shortage(head, without=lower)
        if self._shortage is not None:
            return
        preemptible = [each for each in lower if self._is_preemptible(each)]
        if len(preemptible) < len(lower) and self._memory.shortage(head, without=preemptible) is not None:
            return
        while preemptible and not self._fence.has_retired_requests and not self._memory.fits(head):
            self.preempt(preemptible.pop())

    def _is_preemptible(self, request: Request) -> bool:
        """Return whether its blocks would be free soon after a preemption. Blocks on offer wait for their reader."""
        return request.has_unplanned_tokens and not self._transfers.grows(request)

    def _grow(self, request: Request, builder: StepBuilder) -> list[list[int]]:
        """Return one more block in each group; an empty list if the request has to miss this step."""
        if self._memory.gives_back:
            self._give_back_behind(request)
        while not (new_blocks := self._memory.grow(request)):
            self.lacks_blocks = True
            if self._will_get_blocks(request):
                return []
            last = self._next_to_preempt()
            if last is not None and last is not request:
                self.preempt(last)
                continue
            # No request before it needs its blocks, so it keeps them while others run.
            nothing_in_flight = self._fence.has_passed(builder.step - 1)
            if builder.is_empty and nothing_in_flight:
                self.preempt(request)
                self.lacks_blocks = False
            return []
        return new_blocks

    def _will_get_blocks(self, request: Request) -> bool:
        """Return whether blocks that the request lacks are on their way back: for a step in flight, or a reader."""
        if self._fence.has_retired_requests or self._transfers.has_withdrawn_offers:
            return True
        return all(self._fence.will_release_blocks(group) for group in self._memory.dry_groups(request))

    def _preempt_waiting_for_slots(self, builder: StepBuilder, prefills: list[Request]) -> None:
        """Preempt the last request if all wait for slots of states, which requests that wait for a row may be holding.

        It loses nothing that is computed: the slot that it cannot write is a checkpoint, from which it continues.
        """
        if self.has_free_row or not self._fence.has_passed(builder.step - 1):
            return
        if any(self._memory.may_extend_states(each, each.num_computed + 1) for each in self):
            return
        last = self._by_queue_key[-1]
        if last in prefills:
            prefills.remove(last)
        self.preempt(last)
        self.lacks_blocks = False

    def _next_to_preempt(self) -> Request | None:
        """Return the next request to preempt. One whose last token is planned gives its blocks back soon anyway."""
        return next((request for request in reversed(self._by_queue_key) if request.has_unplanned_tokens), None)

    def preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._by_queue_key.remove(request)
        request.move_to(RequestStatus.PREEMPTED)
        self._transfers.give_up_early(request)
        self._fence.retire(*request.give_up_memory(), request.last_step)
        self._waiting.push(request)

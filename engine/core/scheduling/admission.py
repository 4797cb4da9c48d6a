"""Admission of waiting requests: load KV that exists elsewhere, then give the request blocks, a row and a first chunk.

waiting ── its KV is at another engine, or in a tier ──> KVLoading ──> ready ──┐
   └────── it is nowhere, or computing it is faster ───────────────────────────┴─ Admission ──> running
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..kv.fence import Fence
from ..kv.request_memory import RequestMemory, RestorePlan
from ..kv.tier_copies import Restoration, TierCopies
from ..kv.transfers import Transfers
from ..messages import EngineError, ErrorKind
from ..requests.request import Request, RequestStatus
from ..stages import Stage
from .queues import ReadyQueue, WaitingQueue
from .running_requests import RunningRequests
from .step_builder import StepBuilder

SHORT_SHARE = 4  # while long prompts are read, a quarter of a step's budget is kept for short ones
SMALL = 8  # a request that needs at most an eighth of the head's blocks may overtake it


class KVLoading:
    """Requests whose blocks are being filled: with KV from another engine, or from the tiers.

        waiting ── begin ──> WAITING_FOR_KV ── its KV came ──> ready ──> running
           ^                    │      └──── a transfer failed ──> ended
           └────────────────────┘
              a restore took too long, or did not bring the blocks of all groups: the request is looked up again

    Loading needs neither a row nor budget, so it may begin before a row is free: for one batch of requests at most.
    """

    def __init__(
        self,
        transfers: Transfers,
        tier_copies: TierCopies,
        memory: RequestMemory,
        fence: Fence,
        waiting: WaitingQueue,
        batch: int,
    ) -> None:
        """Create it for an engine that runs at most `batch` requests at once."""
        self.ready = ReadyQueue()
        self._transfers = transfers
        self._tier_copies = tier_copies
        self._memory = memory
        self._fence = fence
        self._waiting = waiting
        self._batch = batch
        self._behind_restores: set[Request] = set()  # requests that wait for blocks which a restore brings for another
        self._num_restores_over = 0  # when they were looked up: their lookups hold until a restore is over

    @property
    def num_coming(self) -> int:
        return self._transfers.num_pulling + self._tier_copies.num_restoring

    def begin_transfer(self, request: Request) -> bool:
        """Ask the other engine for the request's KV. Returns False if the request has to wait first."""
        if not self._may_run_ahead or not self._memory.reserve(request):
            return False
        self._wait_for_kv(request)
        self._transfers.receive(request)
        return True

    def find_restore(self, request: Request) -> RestorePlan | None:
        """Return what to restore of the request's prefix from the tiers; None if computing it is better."""
        if not self._tier_copies.has_tiers or not self._fence.has_passed(request.last_step):
            return None
        return self._tier_copies.find(request)

    def begin_restore(self, request: Request, plan: RestorePlan) -> bool:
        """Ask the tiers for the request's prefix. Returns False if the request has to wait first.

        If its blocks are already being restored for another request, it waits until they are in the pool.
        """
        if self._tier_copies.is_being_restored(plan):
            self._behind_restores.add(request)
            return False
        if not self._may_run_ahead or not self._memory.reserve(request, plan):
            return False
        self._wait_for_kv(request)
        self._tier_copies.restore(request, plan)
        return True

    def waits_for_restore(self, request: Request) -> bool:
        """Return whether a restore brings blocks of the request's prefix for another request, as last looked up."""
        if self._num_restores_over != self._tier_copies.num_restores_over:
            self._num_restores_over = self._tier_copies.num_restores_over
            self._behind_restores.clear()
        return request in self._behind_restores

    def poll(self) -> list[tuple[Request, EngineError]]:
        """Make requests ready whose KV has arrived. Returns the requests whose KV is lost."""
        lost = []
        for request, failure, offer_ended in self._transfers.poll():
            if failure is None:
                self._arrived(request)
            else:
                kind = ErrorKind.KV_EXPIRED if offer_ended else ErrorKind.KV_LOST
                lost.append((request, EngineError(kind, f"the KV blocks of the prompt did not arrive: {failure}")))
        for restoration in self._tier_copies.poll():
            self._restored(restoration)
        return lost

    def remove(self, request: Request) -> None:
        """Give up loading for a request that has ended. One that is neither loading nor ready is ignored."""
        if self._tier_copies.restores(request):
            self._tier_copies.cancel(request)
        elif request.status is RequestStatus.WAITING_FOR_KV:
            self._transfers.cancel(request)
        elif request.has_blocks:
            self.ready.remove(request)

    @property
    def _may_run_ahead(self) -> bool:
        return self.num_coming + len(self.ready) < self._batch

    def _wait_for_kv(self, request: Request) -> None:
        self._waiting.remove(request)
        request.move_to(RequestStatus.WAITING_FOR_KV)

    def _arrived(self, request: Request) -> None:
        assert request.message.kv_source is not None
        # Prefix hits may reach further than the transfer: these blocks are shared, and are never written again.
        self._make_ready(request, max(request.num_computed, request.message.kv_source.num_tokens))

    def _restored(self, restoration: Restoration) -> None:
        request = restoration.request
        if request.has_blocks:
            self._make_ready(request, request.num_computed + restoration.num_tokens)
        else:
            request.move_to(RequestStatus.WAITING)
            self._waiting.push(request)

    def _make_ready(self, request: Request, num_computed: int) -> None:
        request.loaded(num_computed)
        self._memory.register(request)
        request.move_to(RequestStatus.WAITING)
        self.ready.add(request)


@dataclass(frozen=True)
class Queues:
    """The queues in which a live request can be. One whose grammar is being compiled is in none."""

    waiting: WaitingQueue
    loading: KVLoading
    running: RunningRequests


class Admission:
    """Decides which waiting requests may start: first those that are ready, then the queue in order.

    A request starts when there is a row, budget in this step, and blocks for all of its tokens. Long prompts delay
    short ones only within bounds:

    * While a long prompt is read over several steps, a share of each step is kept for prompts that fit into it whole.
    * While the head of the queue waits for a restore that was begun for another request, those behind it go first.
    * While the head of the queue waits for blocks, requests that need few of them may overtake it, until they have been
      given as many together as the head needs: then the head is next, whatever comes.
    """

    def __init__(self, queues: Queues, memory: RequestMemory, fence: Fence, tier_copies: TierCopies) -> None:
        self.num_prompt_tokens = 0  # of all requests so far that started here, rather than after a hand-off
        self._waiting = queues.waiting
        self._loading = queues.loading
        self._running = queues.running
        self._memory = memory
        self._fence = fence
        self._tier_copies = tier_copies

    def preempt_for_head(self) -> None:
        """Preempt running requests of lower priority if their blocks are all that the head of the queue lacks."""
        head = self._waiting.peek()
        if head is not None:
            self._running.preempt_for(head)

    def admit_ready(self, builder: StepBuilder) -> None:
        ready = self._loading.ready
        while ready.head is not None and self._running.has_free_row and builder.budget:
            self._start(ready.take(), builder)

    def choose_short(self, prefills: Sequence[Request], builder: StepBuilder) -> list[Request]:
        """Return waiting prompts to start in this step, although prompts being read could use all of it."""
        unread = sum(request.num_tokens - request.num_computed for request in prefills)
        if unread < builder.budget or not self._running.has_free_row or self._running.lacks_blocks:
            return []
        head = self._waiting.peek()
        if head is None:
            return []
        share, chosen, lacks_blocks = builder.budget // SHORT_SHARE, list[Request](), not self._memory.fits(head)
        for request in (head, *self._waiting.behind_head()):
            if len(chosen) == self._running.num_free_rows:
                break
            if lacks_blocks and not self._may_pass(request, head):
                continue
            may_start = request.num_tokens <= share and not request.awaits_transfer and self._memory.fits(request)
            if may_start and self._loading.find_restore(request) is None:
                share -= request.num_tokens
                chosen.append(request)
        return chosen

    def admit_short(self, chosen: Sequence[Request], builder: StepBuilder) -> None:
        """Start the chosen prompts, as far as rows and blocks allow."""
        head = self._waiting.peek()
        passed = head if chosen and head is not None and not self._memory.fits(head) else None
        for request in chosen:
            if passed is None:
                self._admit(request, builder)
            else:
                self._overtake(request, passed, builder)

    def admit_waiting(self, builder: StepBuilder) -> None:
        """Start waiting requests in order."""
        while not self._running.lacks_blocks and (request := self._waiting.peek()):
            if not self._admit(request, builder):
                if self._loading.waits_for_restore(request):
                    self._admit_others(builder)
                else:
                    self._admit_small_requests(request, builder)
                return

    def _admit(self, request: Request, builder: StepBuilder) -> bool:
        """Take a request out of the queue: into this step, or to load its KV. Returns False if it has to wait."""
        if request.awaits_transfer:
            return self._loading.begin_transfer(request)
        if self._loading.waits_for_restore(request):
            return False
        if not self._memory.fits(request):  # there is no room for loading either, so the tiers need not be asked
            return False
        if (plan := self._loading.find_restore(request)) is not None:
            return self._loading.begin_restore(request, plan)
        if builder.budget and self._running.has_free_row and self._reserve(request, builder):
            self._waiting.remove(request)
            self._start(request, builder)
            return True
        return False

    def _admit_others(self, builder: StepBuilder) -> None:
        """Start requests behind the head in order, except those that also wait for a restore of another request."""
        for request in self._waiting.behind_head():
            if not self._admit(request, builder) and not self._loading.waits_for_restore(request):
                return

    def _admit_small_requests(self, head: Request, builder: StepBuilder) -> None:
        """Let requests that need few blocks overtake a head that lacks blocks."""
        needed = self._memory.num_blocks(head)
        if head.num_blocks_passed >= needed or self._memory.fits(head):
            return
        for request in self._waiting.behind_head():
            self._overtake(request, head, builder)

    def _overtake(self, request: Request, head: Request, builder: StepBuilder) -> None:
        """Start a request before a head that lacks blocks, if it may."""
        if self._may_pass(request, head) and self._admit(request, builder):
            head.num_blocks_passed += self._memory.num_blocks(request)

    def _may_pass(self, request: Request, head: Request) -> bool:
        """Return whether a request needs so few blocks that it may start before a head that lacks blocks."""
        needed, num_blocks = self._memory.num_blocks(head), self._memory.num_blocks(request)
        return num_blocks * SMALL <= needed and head.num_blocks_passed + num_blocks <= needed

    def _reserve(self, request: Request, builder: StepBuilder) -> bool:
        """Reserve the request's blocks. Returns False if it cannot start in this step.

        A preempted request comes back only when all its drawn tokens are known. If it would run a single token, it is a
        decode, which only reads KV of earlier steps; and a state to continue from must be of an earlier step, too. If
        this step computes such KV or such a state, the request starts in the next step.
        """
        known = self._fence.has_passed(request.last_step)
        if not known or self._memory.must_follow(builder.filled_blocks, request, builder.budget):
            return False
        return self._memory.reserve(request)

    def _start(self, request: Request, builder: StepBuilder) -> None:
        if not request.stages.has_started:
            request.stages.reach(Stage.STARTED)
            request.num_cached_tokens = min(request.num_computed, request.num_prompt)
            self.num_prompt_tokens += 0 if request.message.kv_source else request.num_prompt
            self._tier_copies.started(request)
        self._running.start(request, builder)

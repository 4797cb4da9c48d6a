"""Admission of waiting requests: KV that someone has is loaded, then the request gets blocks, a row and a first chunk.

waiting ── its KV is at another engine, or in a tier ──> KVLoading ──> ready ──┐
   └────── nobody has it, or computing is sooner ──────────────────────────────┴─ Admission ──> running
"""

from __future__ import annotations

from collections.abc import Sequence

from ..kv.fence import Fence
from ..kv.request_memory import RequestMemory, RestorePlan
from ..kv.tier_copies import Restoration, TierCopies
from ..kv.transfers import Transfers
from ..messages import EngineError, ErrorKind
from ..requests.request import Request, RequestStatus
from ..stages import Stage
from .queues import ReadyQueue, RunningRequests, WaitingQueue
from .step_builder import StepBuilder

SHORT_SHARE = 4  # of a step's budget, one part is for short prompts while longer ones are read
SMALL = 8  # a request that needs an eighth of the head's blocks, or fewer, may overtake it


class KVLoading:
    """Requests whose blocks are being filled: with another engine's KV, or from the tiers.

        waiting ── begin ──> WAITING_FOR_KV ── its KV came ──> ready ──> running
           ^                    │      └──── a transfer failed ──> over
           └────────────────────┘
              a restore took too long, or of several groups not all came: it is looked up anew

    Loading needs neither row nor budget, so it runs ahead of the rows, by one batch at most.
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
        """`batch`: how many requests can run at once."""
        self.ready = ReadyQueue()
        self._transfers = transfers
        self._tier_copies = tier_copies
        self._memory = memory
        self._fence = fence
        self._waiting = waiting
        self._batch = batch

    @property
    def num_coming(self) -> int:
        return self._transfers.num_pulling + self._tier_copies.num_restoring

    def begin_transfer(self, request: Request) -> bool:
        """Ask the other engine for the request's KV. Returns False if it has to wait for others first."""
        if not self._may_run_ahead or not self._memory.reserve(request):
            return False
        self._wait_for_kv(request)
        self._transfers.receive(request)
        return True

    def find_restore(self, request: Request) -> RestorePlan | None:
        """Return what of the request's prefix is to be restored from the tiers; None where computing it is better."""
        if not self._tier_copies.exists or not self._fence.has_passed(request.last_step):
            return None
        return self._tier_copies.find(request)

    def begin_restore(self, request: Request, plan: RestorePlan) -> bool:
        """Ask the tiers for the request's prefix. Returns False if it has to wait for others first.

        One whose blocks are being restored for another request waits to find them in the pool.
        """
        if self._tier_copies.any_coming(plan) or not self._may_run_ahead or not self._memory.reserve(request, plan):
            return False
        self._wait_for_kv(request)
        self._tier_copies.restore(request, plan)
        return True

    def poll(self) -> list[tuple[Request, EngineError]]:
        """Make requests whose KV has arrived ready. Returns the requests whose KV is lost."""
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
        """Give up a request that is over. One that is not being loaded or ready is ignored."""
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
        # Prefix hits may reach further than the transfer: those blocks are others' too, and are never written again.
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


class Admission:
    """Decides which waiting requests may start: ready ones first, then the queue in order.

    A request starts when there is a row, budget in this step, and blocks for all of its tokens. Long prompts do not
    hold up short ones without bound:

    * While one is read over several steps, a share of each step is for prompts that fit into it whole.
    * While the head of the queue waits for blocks, requests that need few of them may overtake it, until together they
      were given as many as the head needs: then it is next, whatever comes.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        loading: KVLoading,
        running: RunningRequests,
        memory: RequestMemory,
        fence: Fence,
        tier_copies: TierCopies,
    ) -> None:
        self.num_prompt_tokens = 0  # of all requests that were ever admitted with their prompts to read
        self._waiting = waiting
        self._loading = loading
        self._running = running
        self._memory = memory
        self._fence = fence
        self._tier_copies = tier_copies

    def preempt_for_head(self) -> None:
        """Preempt running requests of lower priority where the head of the queue lacks only their blocks."""
        head = self._waiting.peek()
        if head is not None:
            self._running.preempt_for(head)

    def admit_ready(self, builder: StepBuilder) -> None:
        ready = self._loading.ready
        while ready.head is not None and self._running.has_room and builder.budget:
            self._start(ready.take(), builder)

    def choose_short(self, prefills: Sequence[Request], builder: StepBuilder) -> list[Request]:
        """Return waiting prompts to start in this step though those that are being read could use all of it."""
        unread = sum(request.num_tokens - request.num_computed for request in prefills)
        if unread < builder.budget or not self._running.has_room or self._running.lacks_blocks:
            return []
        head = self._waiting.peek()
        share, chosen = builder.budget // SHORT_SHARE, list[Request]()
        for request in () if head is None else (head, *self._waiting.behind_head()):
            may_start = request.num_tokens <= share and not request.awaits_transfer and self._memory.fits(request)
            if may_start and self._loading.find_restore(request) is None:
                share -= request.num_tokens
                chosen.append(request)
        return chosen

    def admit_short(self, chosen: Sequence[Request], builder: StepBuilder) -> None:
        """Start the prompts that were chosen, as far as rows and blocks go."""
        for request in chosen:
            self._admit(request, builder)

    def admit_waiting(self, builder: StepBuilder) -> None:
        """Start waiting requests in order."""
        while not self._running.lacks_blocks and (request := self._waiting.peek()):
            if not self._admit(request, builder):
                self._admit_small_requests(request, builder)
                return

    def _admit(self, request: Request, builder: StepBuilder) -> bool:
        """Take a request out of the queue: into this step, or to load its KV. False where it has to wait."""
        if request.awaits_transfer:
            return self._loading.begin_transfer(request)
        if not self._memory.fits(request):  # neither to load nor to compute: the tiers need not be asked
            return False
        if (plan := self._loading.find_restore(request)) is not None:
            return self._loading.begin_restore(request, plan)
        if builder.budget and self._running.has_room and self._reserve(request, builder):
            self._waiting.remove(request)
            self._start(request, builder)
            return True
        return False

    def _admit_small_requests(self, head: Request, builder: StepBuilder) -> None:
        """Let requests overtake a head that lacks blocks, each of which needs few beside it."""
        needed = self._memory.num_blocks(head)
        if head.num_blocks_passed >= needed or self._memory.fits(head):
            return
        for request in self._waiting.behind_head():
            num_blocks = self._memory.num_blocks(request)
            may_pass = num_blocks * SMALL <= needed and head.num_blocks_passed + num_blocks <= needed
            if may_pass and self._admit(request, builder):
                head.num_blocks_passed += num_blocks

    def _reserve(self, request: Request, builder: StepBuilder) -> bool:
        """Reserve the request's blocks. False where it cannot start in this step.

        One that was preempted comes back only when all its drawn tokens are known. One that would run a single token is
        a decode, whose old KV must be of earlier steps, and so must be states that one goes on from: it starts in the
        next step where this one computes some of it.
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

"""Who of those that wait may run."""

from __future__ import annotations

from ..kv.fence import Fence
from ..kv.memory import RequestMemory
from ..kv.tier_copies import TierCopies
from ..requests.request import Request
from ..stages import Stage
from .draft import StepDraft
from .filling import Filling
from .queue import WaitingQueue
from .running import RunningRequests


class Admission:
    """Those whose blocks are filled come first, then the queue in order: a row and budget for each, and its blocks."""

    def __init__(
        self,
        waiting: WaitingQueue,
        filling: Filling,
        running: RunningRequests,
        memory: RequestMemory,
        fence: Fence,
        tier_copies: TierCopies,
    ) -> None:
        self.num_prompt_tokens = 0  # of all that were ever admitted with their prompts to read
        self._waiting = waiting
        self._filling = filling
        self._running = running
        self._memory = memory
        self._fence = fence
        self._tier_copies = tier_copies

    def make_way(self) -> None:
        """For the head of the queue, where its priority is higher than that of requests that run."""
        head = self._waiting.peek()
        if head is not None:
            self._running.make_way_for(head)

    def admit_filled(self, draft: StepDraft) -> None:
        filled = self._filling.filled
        while filled.head is not None and self._running.has_room and draft.budget:
            self._start(filled.take(), draft)

    def admit_waiting(self, draft: StepDraft) -> None:
        """In order, and nobody overtakes: a request that does not fit yet would starve otherwise."""
        while not self._running.lacks_blocks and (request := self._waiting.peek()):
            if request.awaits_transfer:
                if not self._filling.begin_transfer(request):
                    return
            elif self._filling.is_in_tiers(request):
                if not self._filling.begin_restore(request):
                    return
            elif draft.budget and self._running.has_room and self._can_start(request, draft):
                self._waiting.remove(request)
                self._start(request, draft)
            else:
                return

    def _can_start(self, request: Request, draft: StepDraft) -> bool:
        """Takes blocks for it.

        One that was preempted comes back only when all its drawn tokens are known. One that would run a single token is
        a decode, whose old KV is of earlier steps: where this very step computes some of it, the next one lets it in.
        """
        known = self._fence.has_passed(request.last_step)
        if not known or self._memory.has_one_token_behind(draft.shared_blocks, request, draft.budget):
            return False
        return self._memory.reserve(request)

    def _start(self, request: Request, draft: StepDraft) -> None:
        if not request.stages.has_started:
            request.stages.reach(Stage.STARTED)
            request.num_cached_tokens = min(request.num_computed, request.num_prompt)
            self.num_prompt_tokens += 0 if request.message.kv_source else request.num_prompt
            self._tier_copies.started(request)
        self._running.start(request, draft)

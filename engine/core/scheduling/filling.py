"""Requests whose blocks others fill: an engine that has read the prompt, or the tiers.

    waiting ── begin ──> WAITING_FOR_KV ──its KV came──> filled ──> running
       ^                    │      └──── a transfer failed ──> over
       └────────────────────┘
          a restore took too long: what did not come is computed

That needs neither row nor budget, so it runs ahead of the rows, by one batch at most.
"""

from __future__ import annotations

from ..kv.fence import Fence
from ..kv.memory import RequestMemory
from ..kv.tier_copies import Restoration, TierCopies
from ..kv.transfers import Transfers
from ..messages import EngineError, ErrorKind
from ..requests.request import Request, RequestStatus
from .filled import FilledRequests
from .queue import WaitingQueue


class Filling:
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
        self.filled = FilledRequests()
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
        """False where it has to wait for others."""
        if not self._may_run_ahead or not self._memory.reserve(request):
            return False
        self._wait_for_kv(request)
        self._transfers.receive(request)
        return True

    def is_in_tiers(self, request: Request) -> bool:
        """Enough of it to be worth a restore."""
        if not self._tier_copies.exists or not self._fence.has_passed(request.last_step):
            return False
        return self._tier_copies.pays(self._memory.missing(request))

    def begin_restore(self, request: Request) -> bool:
        """As a transfer; where another request has the same blocks restored, it waits to find them in the pool."""
        missing = self._memory.missing(request)
        if self._tier_copies.is_coming(missing[0]) or not self._may_run_ahead or not self._memory.reserve(request):
            return False
        self._wait_for_kv(request)
        self._tier_copies.restore(request, missing)
        return True

    def poll(self) -> list[tuple[Request, EngineError]]:
        """Lets requests go on whose KV came. Returns those whose KV is lost."""
        lost = []
        for request, failure in self._transfers.poll():
            if failure is None:
                self._arrived(request)
            else:
                reason = f"the KV blocks of the prompt did not arrive: {failure}"
                lost.append((request, EngineError(ErrorKind.KV_LOST, reason)))
        for restoration in self._tier_copies.poll():
            self._restored(restoration)
        return lost

    def remove(self, request: Request) -> None:
        """It is over. One that nobody fills or has filled is ignored."""
        if self._tier_copies.restores(request):
            self._tier_copies.cancel(request)
        elif request.status is RequestStatus.WAITING_FOR_KV:
            self._transfers.cancel(request)
        elif request.block_ids:
            self.filled.remove(request)

    @property
    def _may_run_ahead(self) -> bool:
        return self.num_coming + len(self.filled) < self._batch

    def _wait_for_kv(self, request: Request) -> None:
        self._waiting.remove(request)
        request.move_to(RequestStatus.WAITING_FOR_KV)

    def _arrived(self, request: Request) -> None:
        assert request.message.kv_source is not None
        # Prefix hits may reach further than the transfer: those blocks are others' too, and are never written again.
        self._go_on(request, max(request.num_computed, request.message.kv_source.num_tokens))

    def _restored(self, restoration: Restoration) -> None:
        request = restoration.request
        if request.block_ids:
            self._go_on(request, request.num_computed + restoration.num_tokens)
        else:
            request.move_to(RequestStatus.WAITING)
            self._waiting.push(request)

    def _go_on(self, request: Request, num_computed: int) -> None:
        request.num_computed = num_computed
        self._memory.register(request)
        request.move_to(RequestStatus.WAITING)
        self.filled.add(request)

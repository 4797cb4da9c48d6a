"""The reader's side of hand-offs through host memory: we read peers' slots into ours, then copy them to the blocks.

receive ──> waits for slots ──> reads into them ──Received──> copies to the blocks ──> the engine is told
                 │ cancel, too long    │ failed: told at once; slots are free when nothing writes them any more
                 └─────────────────────┴──> the blocks have not been touched
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import msgspec

from baton.engine.core.connector import BlocksReleased, ConnectorEvent, KVConnector, Received, ReceiveFailed, TransferId

from ..lease_clock import lease_now
from .copy_thread import CopyThread
from .slots import SlotPool, TransferIds


@dataclasses.dataclass(slots=True)
class _Receive:
    receive_into: Callable[[list[int]], TransferId]  # begins to read into slots
    blocks: list[int]
    asked_at: float
    slots: list[int] = dataclasses.field(default_factory=list)  # empty while it waits for slots
    cancelled: bool = False


class StagedReceives:
    """Reads into slots through the connector `inner`. The step loop calls it, and `emit` gets the engine's events."""

    def __init__(
        self,
        inner: KVConnector,
        slots: SlotPool,
        copies: CopyThread,
        ids: TransferIds,
        *,
        max_wait_s: float,
        emit: Callable[[ConnectorEvent], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = lease_now,
    ) -> None:
        """`max_wait_s` limits how long a receive waits for slots, since the holder's lease lasts no longer."""
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._inner = inner
        self._slots = slots
        self._copies = copies
        self._ids = ids
        self._emit = emit
        self._wake = wake
        self._receives: dict[TransferId, _Receive] = {}
        self._waiting: collections.deque[TransferId] = collections.deque()  # for slots
        self.num_refused = 0

    def start(self, receive_into: Callable[[list[int]], TransferId], blocks: list[int]) -> TransferId:
        """Queue a receive. `receive_into` is the connector's `receive` of it, which lacks only the slots."""
        own = self._ids.new()
        if not self._slots.could_fit(blocks):
            self.num_refused += 1
            self.failed(
                own,
                f"the prompt needs {len(blocks)} slots of this engine's host buffer, which has"
                f" {self._slots.num_slots}: raise transfer.buffer_bytes",
            )
            return own
        self._receives[own] = _Receive(receive_into, blocks, self._clock())
        self._waiting.append(own)
        self.begin()
        return own

    def cancel(self, own: TransferId) -> None:
        receive = self._receives.get(own)
        if receive is None:
            return
        receive.cancelled = True
        if own in self._waiting:
            self._waiting.remove(own)
            del self._receives[own]
            self.failed(own, "cancelled")
        elif (inner := self._ids.inner_of(own)) is not None:  # None: it is being copied
            self._inner.cancel(inner)

    def begin(self) -> None:
        """Begin waiting receives in order, while there are enough free slots."""
        self._give_up_waiting()
        while self._waiting and self._slots.fit(self._receives[self._waiting[0]].blocks):
            own = self._waiting.popleft()
            receive = self._receives[own]
            receive.slots = self._slots.allocate(receive.blocks)
            self._ids.pair(own, receive.receive_into(receive.slots))

    def _give_up_waiting(self) -> None:
        """Fail receives that have waited too long. Slots may be taken for long by a read that does not end."""
        while self._waiting and self._clock() - self._receives[self._waiting[0]].asked_at >= self._max_wait_s:
            own = self._waiting.popleft()
            del self._receives[own]
            self.num_refused += 1
            self.failed(
                own,
                f"no slots of this engine's host buffer came free within {self._max_wait_s:g} s:"
                " raise transfer.buffer_bytes",
            )

    def received(self, own: TransferId, event: Received) -> None:
        """Copy the slots of a committed receive to its blocks."""
        receive = self._receives[own]
        if receive.cancelled:
            self._copied(own, receive, event)
            return
        pairs = list(zip(receive.blocks, receive.slots, strict=True))
        self._copies.up(pairs, lambda: self._copied(own, receive, event))

    def failed(self, own: TransferId, reason: str, *, offer_ended: bool = False) -> None:
        """Report a failed receive to the engine. Nothing has been written into its blocks."""
        self._emit(ReceiveFailed(own, reason, offer_ended))
        self._emit(BlocksReleased(own))
        self._wake()  # if a receive is refused at once, nothing else wakes the step loop

    def released(self, own: TransferId) -> None:
        """Free the slots of a receive, into which no read can write any more."""
        self._slots.release(self._receives.pop(own).slots)

    def _copied(self, own: TransferId, receive: _Receive, event: Received) -> None:
        if receive.cancelled:
            self.failed(own, "cancelled")
        else:
            self._emit(msgspec.structs.replace(event, transfer_id=own))
        self.released(own)

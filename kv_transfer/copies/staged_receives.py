"""The reader's side of hand-offs by way of the host: places are read into, and copied to the blocks once that counts.

receive ──> waits for places ──> reads into them ──Received──> copies ──> told
                  │ cancel, too long    │ failed: told at once; places are free when nothing writes them any more
                  └─────────────────────┴──> the blocks have not been touched
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import msgspec

from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    KVConnector,
    Received,
    ReceiveFailed,
    TransferId,
)
from baton.engine.core.kv.blocks import BlockPool

from ..lease_clock import lease_now
from .copier import Copier
from .names import Names


@dataclasses.dataclass(slots=True)
class _Receive:
    arguments: tuple[str, int, bytes, int]  # request id, generation, ticket, first block
    blocks: list[int]
    asked_at: float
    places: list[int] = dataclasses.field(default_factory=list)  # none while it waits for them
    cancelled: bool = False


class StagedReceives:
    """`inner` reads into places. The step loop calls it; `tell` gets what the engine is to hear."""

    def __init__(
        self,
        inner: KVConnector,
        places: BlockPool,
        copier: Copier,
        names: Names,
        *,
        patience_s: float,
        tell: Callable[[ConnectorEvent], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = lease_now,
    ) -> None:
        """`patience_s`: for places. What a holder promises should last no longer."""
        self._patience_s = patience_s
        self._clock = clock
        self._inner = inner
        self._places = places
        self._copier = copier
        self._names = names
        self._tell = tell
        self._wake = wake
        self._receives: dict[TransferId, _Receive] = {}
        self._waiting: collections.deque[TransferId] = collections.deque()  # for places
        self.num_refused = 0

    def start(self, arguments: tuple[str, int, bytes, int], blocks: list[int]) -> TransferId:
        """`arguments`: those of the connector's `receive` but for the blocks."""
        own = self._names.new()
        if len(blocks) > self._places.num_blocks:
            self.num_refused += 1
            self.failed(
                own,
                f"the prompt needs {len(blocks)} places of this engine's host buffer, which has"
                f" {self._places.num_blocks}: raise transfer.buffer_bytes",
            )
            return own
        self._receives[own] = _Receive(arguments, blocks, self._clock())
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
        elif (inner := self._names.inner_of(own)) is not None:  # otherwise it is being copied
            self._inner.cancel(inner)

    def begin(self) -> None:
        """Those that wait, in their order, as far as there are places."""
        self._give_up_waiting()
        while self._waiting and len(self._receives[self._waiting[0]].blocks) <= self._places.num_free:
            own = self._waiting.popleft()
            receive = self._receives[own]
            receive.places = self._places.allocate(len(receive.blocks))
            self._names.pair(own, self._inner.receive(*receive.arguments, receive.places))

    def _give_up_waiting(self) -> None:
        """Others may keep their places for long, where a read does not end."""
        while self._waiting and self._clock() - self._receives[self._waiting[0]].asked_at >= self._patience_s:
            own = self._waiting.popleft()
            del self._receives[own]
            self.num_refused += 1
            self.failed(
                own,
                f"no places of this engine's host buffer came free within {self._patience_s:g} s:"
                " raise transfer.buffer_bytes",
            )

    def received(self, own: TransferId, event: Received) -> None:
        """Committed: the holder may let go, and the places are ours."""
        receive = self._receives[own]
        if receive.cancelled:
            self._copied(own, receive, event)
            return
        pairs = list(zip(receive.blocks, receive.places, strict=True))
        self._copier.up(pairs, lambda: self._copied(own, receive, event))

    def failed(self, own: TransferId, reason: str) -> None:
        """The blocks have not been touched."""
        self._tell(ReceiveFailed(own, reason))
        self._tell(BlocksReleased(own))
        self._wake()  # it may have been refused on the spot: nobody else says that there is news

    def released(self, own: TransferId) -> None:
        """No read writes into the places any more."""
        self._places.release(self._receives.pop(own).places)

    def _copied(self, own: TransferId, receive: _Receive, event: Received) -> None:
        if receive.cancelled:
            self.failed(own, "cancelled")
        else:
            self._tell(msgspec.structs.replace(event, transfer_id=own))
        self.released(own)

"""The holder's side of hand-offs through host memory: blocks on offer are copied to staging slots, which peers read.

offer ──> a slot for each block ──advance: copy──> ready ──offer ended, no copy runs──> slots are free
      └─> too few slots: the ticket says so, and the offer ends at once
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import msgspec

from baton.engine.core.connector import ConnectorEvent, Offer, OfferEnded, OfferOutcome, TransferId

from ..connector import TransferConnector
from ..protocol.ticket import Ticket
from .copy_thread import CopyThread
from .slots import SlotPool, TransferIds

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Staged:
    """An offer: its blocks, their slots, and the progress of the copies."""

    blocks: list[int]
    slots: list[int]
    num_ordered: int = 0  # leading blocks whose copy is ordered
    num_copies: int = 0  # running copies
    ended: bool = False


class StagedOffers:
    """Offers slots through the connector `inner`. The step loop calls it, and `emit` gets the engine's events."""

    def __init__(
        self,
        inner: TransferConnector,
        slots: SlotPool,
        copies: CopyThread,
        ids: TransferIds,
        *,
        emit: Callable[[ConnectorEvent], None],
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._copies = copies
        self._ids = ids
        self._emit = emit
        self._offers: dict[TransferId, _Staged] = {}
        self.num_refused = 0

    def offer(self, request_id: str, generation: int, blocks: list[int], num_tokens: int) -> Offer:
        """Offer blocks, none of which is written or copied yet."""
        if not self._slots.fit(blocks):
            return self._refuse(request_id, generation, len(blocks), num_tokens)
        slots = self._slots.allocate(blocks)
        inner = self._inner.offer_growing(request_id, generation, slots, num_tokens)
        own = self._ids.pair(self._ids.new(), inner.transfer_id)
        self._offers[own] = _Staged(blocks, slots)
        return Offer(own, inner.ticket)

    def advance(self, own: TransferId, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        """Copy the first `num_ready` blocks, which are written. `last_blocks` replace as many, but keep their slots."""
        staged, inner = self._offers.get(own), self._ids.inner_of(own)
        if staged is None or inner is None or num_ready <= staged.num_ordered:
            return
        if last_blocks:
            staged.blocks[-len(last_blocks) :] = last_blocks
        start, staged.num_ordered = staged.num_ordered, num_ready
        staged.num_copies += 1
        pairs = list(zip(staged.blocks[start:num_ready], staged.slots[start:num_ready], strict=True))
        self._copies.down(pairs, lambda: self._inner.advance(inner, num_ready), lambda: self._copied(own, staged))

    def withdraw(self, own: TransferId) -> None:
        inner = self._ids.inner_of(own)
        if inner is not None:
            self._inner.withdraw(inner)

    def ended(self, own: TransferId, outcome: OfferOutcome) -> None:
        self._emit(OfferEnded(own, outcome))
        staged = self._offers.get(own)
        if staged is not None:
            staged.ended = True
            self._release_when_over(own, staged)

    def _refuse(self, request_id: str, generation: int, num_blocks: int, num_tokens: int) -> Offer:
        self.num_refused += 1
        reason = (
            f"its host buffer has {self._slots.num_free} of {self._slots.num_slots} slots free and the prompt needs"
            f" {num_blocks}: raise transfer.buffer_bytes"
        )
        if self.num_refused == 1:
            logger.warning("the blocks of a prompt are not offered: %s; further cases are only counted", reason)
        inner = self._inner.offer_growing(request_id, generation, range(num_blocks), num_tokens)
        self._inner.withdraw(inner.transfer_id)
        ticket = msgspec.structs.replace(Ticket.decode(inner.ticket), refusal=reason)
        return Offer(self._ids.pair(self._ids.new(), inner.transfer_id), ticket.encode())

    def _copied(self, own: TransferId, staged: _Staged) -> None:
        staged.num_copies -= 1
        self._release_when_over(own, staged)

    def _release_when_over(self, own: TransferId, staged: _Staged) -> None:
        """Release the slots of an offer that has ended once no copy writes into them."""
        if staged.ended and not staged.num_copies:
            del self._offers[own]
            self._slots.release(staged.slots)

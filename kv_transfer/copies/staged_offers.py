"""The holder's side of hand-offs by way of the host: blocks on offer are copied to places, which peers read.

offer ──> a place for each block ──advance: copy──> ready ──ended, and no copy is on its way──> places are free
      └─> too few are free: an offer that says so, and ends at once
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import msgspec

from baton.engine.core.connector import ConnectorEvent, Offer, OfferEnded, OfferOutcome, TransferId
from baton.engine.core.kv.blocks import BlockPool

from ..connector import TransferConnector
from ..protocol.messages import Ticket
from .copier import Copier
from .names import Names

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Staged:
    """An offer: its blocks, the places they are copied to, and how far that is ordered."""

    blocks: list[int]
    places: list[int]
    num_ordered: int = 0
    num_copies: int = 0  # on their way
    ended: bool = False


class StagedOffers:
    """`inner` offers the places. The step loop calls it; `tell` gets what the engine is to hear."""

    def __init__(
        self,
        inner: TransferConnector,
        places: BlockPool,
        copier: Copier,
        names: Names,
        *,
        tell: Callable[[ConnectorEvent], None],
    ) -> None:
        self._inner = inner
        self._places = places
        self._copier = copier
        self._names = names
        self._tell = tell
        self._offers: dict[TransferId, _Staged] = {}
        self.num_refused = 0

    def offer(self, request_id: str, generation: int, blocks: list[int], num_tokens: int) -> Offer:
        """None of them is copied yet."""
        if len(blocks) > self._places.num_free:
            return self._refuse(request_id, generation, len(blocks), num_tokens)
        places = self._places.allocate(len(blocks))
        inner = self._inner.offer_growing(request_id, generation, places, num_tokens)
        own = self._names.pair(self._names.new(), inner.transfer_id)
        self._offers[own] = _Staged(blocks, places)
        return Offer(own, inner.ticket)

    def advance(self, own: TransferId, num_ready: int) -> None:
        """So many leading blocks are written, and are copied now."""
        staged, inner = self._offers.get(own), self._names.inner_of(own)
        if staged is None or inner is None or num_ready <= staged.num_ordered:
            return
        start, staged.num_ordered = staged.num_ordered, num_ready
        staged.num_copies += 1
        pairs = list(zip(staged.blocks[start:num_ready], staged.places[start:num_ready], strict=True))
        self._copier.down(pairs, lambda: self._inner.advance(inner, num_ready), lambda: self._copied(own, staged))

    def withdraw(self, own: TransferId) -> None:
        inner = self._names.inner_of(own)
        if inner is not None:
            self._inner.withdraw(inner)

    def ended(self, own: TransferId, outcome: OfferOutcome) -> None:
        self._tell(OfferEnded(own, outcome))
        staged = self._offers.get(own)
        if staged is not None:
            staged.ended = True
            self._give_back_when_over(own, staged)

    def _refuse(self, request_id: str, generation: int, num_blocks: int, num_tokens: int) -> Offer:
        self.num_refused += 1
        reason = (
            f"its host buffer has {self._places.num_free} of {self._places.num_blocks} places free and the prompt needs"
            f" {num_blocks}: raise transfer.buffer_bytes"
        )
        if self.num_refused == 1:
            logger.warning("a prompt is not on offer: %s; further ones are only counted", reason)
        inner = self._inner.offer_growing(request_id, generation, range(num_blocks), num_tokens)
        self._inner.withdraw(inner.transfer_id)
        ticket = msgspec.structs.replace(Ticket.decode(inner.ticket), refusal=reason)
        return Offer(self._names.pair(self._names.new(), inner.transfer_id), ticket.encode())

    def _copied(self, own: TransferId, staged: _Staged) -> None:
        staged.num_copies -= 1
        self._give_back_when_over(own, staged)

    def _give_back_when_over(self, own: TransferId, staged: _Staged) -> None:
        """A copy that is on its way still writes into its places."""
        if staged.ended and not staged.num_copies:
            del self._offers[own]
            self._places.release(staged.places)

"""Hand-offs by way of the host's memory, for blocks whose own memory the transport cannot register.

    holder   block ──copy──> place ══════READ══════> place ──copy──> block   reader
                             registered memory of the host

What peers are told of, and what is promised, are the *places*: blocks of the same layout in the host's memory. An offer
grows as its blocks are copied, so nobody waits for the copies and nothing is read before it is there. A reader's blocks
are filled after its receive was committed; a read that was given up can write into places only, so the blocks come back
at once and the places are kept until it is over.

Where too few places are free an offer is refused, which the ticket says, and a receive waits for others to end, for as
long as a promise lasts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    GrowingConnector,
    Offer,
    OfferEnded,
    Received,
    ReceiveFailed,
    TransferId,
)
from baton.engine.core.kv.blocks import BlockPool
from baton.engine.core.layout import KVRegion

from ..connector import TransferConnector
from ..errors import NotRegistrable
from ..net.channel import RankSocket
from ..protocol.stats import TransferStats
from ..settings import PeerInfo, TransferSettings
from .copier import Copier
from .group_copies import GroupCopies
from .host_memory import Copies, open_copies
from .names import Names
from .places import take_places
from .staged_offers import StagedOffers
from .staged_receives import StagedReceives

logger = logging.getLogger(__name__)


def open_connector(
    region: KVRegion, *, settings: TransferSettings, copies: RankSocket | None = None, **arguments: Any
) -> TransferConnector | HostBuffer:
    """A connector over the blocks themselves or by way of the host's memory, as `settings.buffer` says.

    The other arguments are those of `TransferConnector`. `copies`: where the other ranks of a group join for copies; it
    is closed with the connector, and stays open where this raises. Raises `TransportError`.
    """
    if settings.buffer == "host":
        return HostBuffer(region, settings=settings, copies=copies, **arguments)
    try:
        direct = TransferConnector(region, settings=settings, **arguments)
    except NotRegistrable as error:
        if settings.buffer == "device":
            raise
        logger.warning("blocks go by way of the host's memory, which takes longer: %s", error)
        return HostBuffer(region, settings=settings, copies=copies, **arguments)
    if copies is not None:
        copies.close()
    return direct


class HostBuffer(GrowingConnector):
    """A connector by way of the host's memory. The step loop calls it.

    Raises `TransportError` where the buffer holds no block or cannot be registered either.
    """

    def __init__(
        self,
        region: KVRegion,
        *,
        settings: TransferSettings,
        copies: RankSocket | None = None,
        wake: Callable[[], None] = lambda: None,
        **arguments: Any,
    ) -> None:
        memory, places = take_places(region, settings.buffer_bytes)
        self._places = BlockPool(places.num_blocks)
        self._ranks = copies
        self._inner = TransferConnector(places, settings=settings, wake=wake, buffered=True, **arguments)

        def begin() -> Copies:
            return open_copies(region, memory) if copies is None else GroupCopies(region, memory, copies)

        try:
            self._copier = Copier(begin, wake, region.device, settings.cpu_affinity)
        except Exception:
            self._inner.close()
            raise
        self.offers_early = self._inner.offers_early
        self.address = self._inner.address
        self._names = Names()
        self._events: list[ConnectorEvent] = []
        self._offers = StagedOffers(self._inner, self._places, self._copier, self._names, tell=self._events.append)
        self._receives = StagedReceives(
            self._inner,
            self._places,
            self._copier,
            self._names,
            patience_s=settings.lease_s,
            tell=self._events.append,
            wake=wake,
        )

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        offer = self.offer_growing(request_id, generation, block_ids, num_tokens)
        self.advance(offer.transfer_id, len(block_ids))
        return offer

    def offer_growing(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        return self._offers.offer(request_id, generation, list(block_ids), num_tokens)

    def advance(self, transfer_id: TransferId, num_ready: int) -> None:
        self._offers.advance(transfer_id, num_ready)

    def withdraw(self, transfer_id: TransferId) -> None:
        self._offers.withdraw(transfer_id)

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        return self._receives.start((request_id, generation, ticket, first_block), list(block_ids))

    def cancel(self, transfer_id: TransferId) -> None:
        self._receives.cancel(transfer_id)

    def poll(self) -> list[ConnectorEvent]:
        """Raises `TransferThreadDied` once nothing more can happen."""
        for done in self._copier.poll():
            done()
        for event in self._inner.poll():
            self._take(event, self._names.own_of(event.transfer_id))
        self._receives.begin()
        events = self._events.copy()
        self._events.clear()
        return events

    def peers_changed(self, live: Collection[PeerInfo]) -> None:
        self._inner.peers_changed(live)

    def stats(self) -> TransferStats:
        used = self._places.num_blocks - self._places.num_free
        refusals = self._offers.num_refused + self._receives.num_refused
        return msgspec.structs.replace(self._inner.stats(), buffer_blocks=used, buffer_refusals=refusals)

    def close(self) -> None:
        self._copier.close()
        self._inner.close()
        if self._ranks is not None:
            self._ranks.close()

    def _take(self, event: ConnectorEvent, own: TransferId) -> None:
        """What became of places."""
        match event:
            case OfferEnded():
                self._offers.ended(own, event.outcome)
            case Received():
                self._receives.received(own, event)
            case ReceiveFailed():
                self._receives.failed(own, event.reason)
                return  # `BlocksReleased` follows
            case BlocksReleased():
                self._receives.released(own)
        self._names.forget(own)

"""Hand-offs through staging slots in host memory, for blocks that the transport cannot register.

    holder   block ──copy──> slot ══════READ══════> slot ──copy──> block   reader
                             registered host memory

Peers see only the *staging slots*, blocks of the same layout in host memory, and leases are for slots. An offer grows
as its blocks are copied, so no step waits for the copies and no slot is read before it is filled. A reader copies slots
to its blocks after the receive is committed. A cancelled read can write into slots only: the engine gets its blocks
back at once, and the slots stay reserved until the read has ended.

If too few slots are free, an offer is refused (the ticket says so), and a receive waits until others end, for at most
`transfer.lease_s`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Sequence

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
from baton.engine.core.regions import CacheRegion

from ..block_copies import BlockCopier
from ..connector import TransferConnector
from ..errors import NotRegistrable
from ..group.rpc import GroupSocket
from ..lease_clock import lease_now
from ..protocol.stats import TransferStats
from ..settings import LocalEngine, PeerInfo, TransferSettings
from .copy_thread import CopyThread
from .group_copies import GroupBlockCopier
from .offers import StagedOffers
from .receives import StagedReceives
from .slots import SlotPool, StagingCopier, TransferIds, take_staging_slots

logger = logging.getLogger(__name__)


def open_connector(
    region: CacheRegion,
    me: LocalEngine,
    *,
    settings: TransferSettings,
    wake: Callable[[], None] = lambda: None,
    read_socket: GroupSocket | None = None,
    copy_socket: GroupSocket | None = None,
) -> TransferConnector | HostBufferConnector:
    """Open a connector for the blocks themselves or through staging slots, as `settings.buffer` says.

    The other ranks of a group join for reads at `read_socket`, for copies at `copy_socket`. `close` closes both; if
    this function raises, they stay open. Raises `TransportError`.
    """

    def through_slots() -> HostBufferConnector:
        return HostBufferConnector(
            region, me, settings=settings, wake=wake, read_socket=read_socket, copy_socket=copy_socket
        )

    if settings.buffer == "host":
        return through_slots()
    try:
        direct = TransferConnector(region, me, settings=settings, wake=wake, read_socket=read_socket)
    except NotRegistrable as error:
        if settings.buffer == "device":
            raise
        logger.warning("hand-offs use a buffer in host memory, which is slower: %s", error)
        return through_slots()
    if copy_socket is not None:
        copy_socket.close()
    return direct


class HostBufferConnector(GrowingConnector):
    """A connector through staging slots. The step loop calls it.

    Raises `TransportError` if the buffer is too small for a block, or cannot be registered either.
    """

    def __init__(
        self,
        region: CacheRegion,
        me: LocalEngine,
        *,
        settings: TransferSettings,
        wake: Callable[[], None] = lambda: None,
        read_socket: GroupSocket | None = None,
        copy_socket: GroupSocket | None = None,
        clock: Callable[[], float] = lease_now,
    ) -> None:
        """`clock` measures how long receives wait for slots. For the other arguments see `open_connector`."""
        slots = take_staging_slots(region, settings.buffer_bytes)
        self._slots = SlotPool(region, slots.region)
        self._copy_socket = copy_socket
        self._inner = TransferConnector(
            slots.region, me, settings=settings, wake=wake, read_socket=read_socket, staged=True
        )

        def begin() -> BlockCopier:
            if copy_socket is None:
                return StagingCopier(region, slots)
            return GroupBlockCopier(region, slots, copy_socket)

        try:
            self._copies = CopyThread(begin, wake, region.device, settings.cpu_affinity)
        except Exception:
            self._inner.close()
            raise
        self.offers_early = self._inner.offers_early
        self.address = self._inner.address
        self._ids = TransferIds()
        self._events: list[ConnectorEvent] = []
        self._offers = StagedOffers(self._inner, self._slots, self._copies, self._ids, emit=self._events.append)
        self._receives = StagedReceives(
            self._inner,
            self._slots,
            self._copies,
            self._ids,
            max_wait_s=settings.lease_s,
            emit=self._events.append,
            wake=wake,
            clock=clock,
        )

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        offer = self.offer_growing(request_id, generation, block_ids, num_tokens)
        self.advance(offer.transfer_id, len(block_ids))
        return offer

    def offer_growing(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        return self._offers.offer(request_id, generation, list(block_ids), num_tokens)

    def advance(self, transfer_id: TransferId, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        self._offers.advance(transfer_id, num_ready, last_blocks)

    def withdraw(self, transfer_id: TransferId) -> None:
        self._offers.withdraw(transfer_id)

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        receive_into = functools.partial(self._inner.receive, request_id, generation, ticket, first_block)
        return self._receives.start(receive_into, list(block_ids))

    def cancel(self, transfer_id: TransferId) -> None:
        self._receives.cancel(transfer_id)

    def poll(self) -> list[ConnectorEvent]:
        """Return the events since the last call. Raises `TransferThreadDied` once there can be no more."""
        for done in self._copies.poll():
            done()
        for event in self._inner.poll():
            self._take(event, self._ids.own_of(event.transfer_id))
        self._receives.begin()
        events = self._events.copy()
        self._events.clear()
        return events

    def peers_changed(self, live: Collection[PeerInfo]) -> None:
        self._inner.peers_changed(live)

    def stats(self) -> TransferStats:
        used = self._slots.num_slots - self._slots.num_free
        refusals = self._offers.num_refused + self._receives.num_refused
        return msgspec.structs.replace(self._inner.stats(), buffer_blocks=used, buffer_refusals=refusals)

    def close(self) -> bool:
        """Close as `TransferConnector` does. Returns False if one of the two threads has not ended."""
        copies_ended, transfers_ended = self._copies.close(), self._inner.close()
        if copies_ended and self._copy_socket is not None:
            self._copy_socket.close()
        return copies_ended and transfers_ended

    def _take(self, event: ConnectorEvent, own: TransferId) -> None:
        """Turn an event about slots into events about blocks."""
        match event:
            case OfferEnded():
                self._offers.ended(own, event.outcome)
            case Received():
                self._receives.received(own, event)
            case ReceiveFailed():
                self._receives.failed(own, event.reason, offer_ended=event.offer_ended)
                return  # `BlocksReleased` follows
            case BlocksReleased():
                self._receives.released(own)
        self._ids.forget(own)

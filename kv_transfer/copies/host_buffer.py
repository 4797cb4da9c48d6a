"""Hand-offs by way of the host's memory, for blocks whose own memory the transport cannot register.

    holder   block ──copy──> place ══════READ══════> place ──copy──> block   reader
                             registered memory of the host

What peers are told of, and what is promised, are the *places*: blocks of the same layout in the host's memory. An offer
grows as its blocks are copied, so nobody waits for the copies and nothing is read before it is there. A reader's blocks
are filled after its receive was committed; a read that was given up can write into places only, so the blocks come back
at once and the places are kept until it is over.

Where too few places are free an offer is refused, which the ticket says, and a receive waits for others to end.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from baton.engine.core.blocks import BlockPool
from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    GrowingConnector,
    Offer,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
    TransferId,
)
from baton.engine.core.layout import KVRegion

from ..connector import TransferConnector
from ..errors import NotRegistrable
from ..network.channel import RankSocket
from ..protocol.messages import Ticket
from ..protocol.stats import TransferStats
from ..settings import PeerInfo, TransferSettings
from .copier import Copier
from .group_copies import GroupCopies
from .host_memory import Copies, Pair, open_copies
from .places import take_places

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


@dataclasses.dataclass(slots=True)
class _Staged:
    """An offer: its blocks, the places they are copied to, and how far that is ordered."""

    blocks: list[int]
    places: list[int]
    num_ordered: int = 0
    num_copies: int = 0  # on their way
    ended: bool = False


@dataclasses.dataclass(slots=True)
class _Receive:
    arguments: tuple[str, int, bytes, int]  # request id, generation, ticket, first block
    blocks: list[int]
    places: list[int] | None = None  # None: waits for them
    cancelled: bool = False


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
        self._ids = itertools.count(1)
        self._events: list[ConnectorEvent] = []
        self._offers: dict[TransferId, _Staged] = {}
        self._receives: dict[TransferId, _Receive] = {}
        self._waiting: collections.deque[TransferId] = collections.deque()  # receives that lack places
        self._inner_of: dict[TransferId, TransferId] = {}
        self._own_of: dict[TransferId, TransferId] = {}
        self._refusals = 0

    # ------------------------------------------------------------------ offers

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        offer = self.offer_growing(request_id, generation, block_ids, num_tokens)
        self.advance(offer.transfer_id, len(block_ids))
        return offer

    def offer_growing(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        blocks = list(block_ids)
        if len(blocks) > self._places.num_free:
            return self._refuse_to_offer(request_id, generation, len(blocks), num_tokens)
        places = self._places.allocate(len(blocks))
        inner = self._inner.offer_growing(request_id, generation, places, num_tokens)
        own = self._link(inner.transfer_id)
        self._offers[own] = _Staged(blocks, places)
        return Offer(own, inner.ticket)

    def advance(self, transfer_id: TransferId, num_ready: int) -> None:
        staged = self._offers.get(transfer_id)
        if staged is None or staged.ended or num_ready <= staged.num_ordered:
            return
        start, staged.num_ordered = staged.num_ordered, num_ready
        staged.num_copies += 1
        inner = self._inner_of[transfer_id]
        self._copier.down(
            _pairs(staged.blocks[start:num_ready], staged.places[start:num_ready]),
            lambda: self._inner.advance(inner, num_ready),
            lambda: self._copied_down(transfer_id, staged),
        )

    def withdraw(self, transfer_id: TransferId) -> None:
        if transfer_id in self._inner_of:
            self._inner.withdraw(self._inner_of[transfer_id])

    def _refuse_to_offer(self, request_id: str, generation: int, num_blocks: int, num_tokens: int) -> Offer:
        self._refusals += 1
        reason = (
            f"its host buffer has {self._places.num_free} of {self._places.num_blocks} places free and the prompt needs"
            f" {num_blocks}: raise transfer.buffer_bytes"
        )
        if self._refusals == 1:
            logger.warning("a prompt is not on offer: %s; further ones are only counted", reason)
        inner = self._inner.offer_growing(request_id, generation, range(num_blocks), num_tokens)
        self._inner.withdraw(inner.transfer_id)
        ticket = msgspec.structs.replace(Ticket.decode(inner.ticket), refusal=reason)
        return Offer(self._link(inner.transfer_id), ticket.encode())

    def _copied_down(self, own: TransferId, staged: _Staged) -> None:
        staged.num_copies -= 1
        self._give_back_when_over(own, staged)

    def _offer_ended(self, own: TransferId, outcome: OfferOutcome) -> None:
        self._events.append(OfferEnded(own, outcome))
        staged = self._offers.get(own)
        if staged is not None:
            staged.ended = True
            self._give_back_when_over(own, staged)

    def _give_back_when_over(self, own: TransferId, staged: _Staged) -> None:
        """A copy that is on its way still writes into its places."""
        if staged.ended and not staged.num_copies:
            del self._offers[own]
            self._places.release(staged.places)

    # ------------------------------------------------------------------ receives

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        own = next(self._ids)
        receive = self._receives[own] = _Receive((request_id, generation, ticket, first_block), list(block_ids))
        if len(receive.blocks) > self._places.num_blocks:
            self._refusals += 1
            self._fail(
                own,
                f"the prompt needs {len(receive.blocks)} places of this engine's host buffer, which has"
                f" {self._places.num_blocks}: raise transfer.buffer_bytes",
            )
            del self._receives[own]
            return own
        self._waiting.append(own)
        self._begin_receives()
        return own

    def cancel(self, transfer_id: TransferId) -> None:
        receive = self._receives.get(transfer_id)
        if receive is None:
            return
        receive.cancelled = True
        if transfer_id in self._waiting:
            self._waiting.remove(transfer_id)
            del self._receives[transfer_id]
            self._fail(transfer_id, "cancelled")
        elif transfer_id in self._inner_of:  # otherwise it is being copied
            self._inner.cancel(self._inner_of[transfer_id])

    def _begin_receives(self) -> None:
        """In their order, as far as there are places."""
        while self._waiting and len(self._receives[self._waiting[0]].blocks) <= self._places.num_free:
            own = self._waiting.popleft()
            receive = self._receives[own]
            receive.places = self._places.allocate(len(receive.blocks))
            self._link(self._inner.receive(*receive.arguments, receive.places), own)

    def _received(self, own: TransferId) -> None:
        """Committed: the holder may let go, and the places are ours."""
        receive = self._receives[own]
        assert receive.places is not None, "a receive begins with places"
        if receive.cancelled:
            self._copied_up(own, receive)
            return
        pairs = _pairs(receive.blocks, receive.places)
        self._copier.up(pairs, lambda: self._copied_up(own, receive))

    def _copied_up(self, own: TransferId, receive: _Receive) -> None:
        if receive.cancelled:
            self._fail(own, "cancelled")
        else:
            self._events.append(Received(own))
        self._forget(own)

    def _forget(self, own: TransferId) -> None:
        receive = self._receives.pop(own)
        assert receive.places is not None, "a receive begins with places"
        self._places.release(receive.places)

    def _fail(self, own: TransferId, reason: str) -> None:
        """The blocks have not been touched."""
        self._events += [ReceiveFailed(own, reason), BlocksReleased(own)]

    # ------------------------------------------------------------------ both

    def poll(self) -> list[ConnectorEvent]:
        """Raises `TransferThreadDied` once nothing more can happen."""
        for done in self._copier.poll():
            done()
        for event in self._inner.poll():
            own = self._own_of[event.transfer_id]
            match event:
                case OfferEnded():
                    self._offer_ended(own, event.outcome)
                    self._unlink(own)
                case Received():
                    self._received(own)
                    self._unlink(own)
                case ReceiveFailed():
                    self._fail(own, event.reason)
                case BlocksReleased():  # no read writes into the places any more
                    self._forget(own)
                    self._unlink(own)
        self._begin_receives()
        events, self._events = self._events, []
        return events

    def peers_changed(self, live: Collection[PeerInfo]) -> None:
        self._inner.peers_changed(live)

    def stats(self) -> TransferStats:
        used = self._places.num_blocks - self._places.num_free
        return msgspec.structs.replace(self._inner.stats(), buffer_blocks=used, buffer_refusals=self._refusals)

    def close(self) -> None:
        self._copier.close()
        self._inner.close()
        if self._ranks is not None:
            self._ranks.close()

    def _link(self, inner: TransferId, own: TransferId | None = None) -> TransferId:
        own = next(self._ids) if own is None else own
        self._inner_of[own], self._own_of[inner] = inner, own
        return own

    def _unlink(self, own: TransferId) -> None:
        del self._own_of[self._inner_of.pop(own)]


def _pairs(blocks: Sequence[int], places: Sequence[int]) -> list[Pair]:
    return list(zip(blocks, places, strict=True))

"""A `KVConnector` between engines of one process: a transfer is a memmove from region to region."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    Offer,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
    TransferId,
)
from baton.engine.core.layout import KVRegion


class Ticket(msgspec.Struct):
    peer: int
    transfer_id: TransferId


@dataclass
class Room:
    """Who is there to copy from."""

    peers: list[CopyConnector] = field(default_factory=list)

    def connect(self, region: KVRegion) -> CopyConnector:
        """What `build_engine` calls."""
        self.peers.append(CopyConnector(self, len(self.peers), region))
        return self.peers[-1]


class CopyConnector:
    """Receives at once; `bytes_moved` counts what arrived here."""

    def __init__(self, room: Room, name: int, region: KVRegion) -> None:
        self.room, self.name, self.region = room, name, region
        self.offered: dict[TransferId, list[int]] = {}
        self.events: list[ConnectorEvent] = []
        self.ids = itertools.count(1)
        self.bytes_moved = 0

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        transfer_id = next(self.ids)
        self.offered[transfer_id] = list(block_ids)
        return Offer(transfer_id, msgspec.msgpack.encode(Ticket(self.name, transfer_id)))

    def withdraw(self, transfer_id: TransferId) -> None:
        self._end(transfer_id, OfferOutcome.WITHDRAWN)

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        transfer_id = next(self.ids)
        wanted = msgspec.msgpack.decode(ticket, type=Ticket)
        peer = self.room.peers[wanted.peer]
        if wanted.transfer_id not in peer.offered:
            self.events += [ReceiveFailed(transfer_id, "the offer has ended"), BlocksReleased(transfer_id)]
            return transfer_id
        size = self.region.layout.block_bytes
        assert self.region.layout.fingerprint == peer.region.layout.fingerprint
        for source, target in zip(peer.offered[wanted.transfer_id][first_block:], block_ids, strict=True):
            ctypes.memmove(self.region.address + target * size, peer.region.address + source * size, size)
            self.bytes_moved += size
        peer._end(wanted.transfer_id, OfferOutcome.FINISHED)
        self.events.append(Received(transfer_id))
        return transfer_id

    def cancel(self, transfer_id: TransferId) -> None:
        """Nothing to give up: a receive is over when it returns."""

    def poll(self) -> list[ConnectorEvent]:
        events, self.events = self.events, []
        return events

    def _end(self, transfer_id: TransferId, outcome: OfferOutcome) -> None:
        if self.offered.pop(transfer_id, None) is not None:
            self.events.append(OfferEnded(transfer_id, outcome))

"""`KVConnector`s between engines of one process: a transfer is a memmove between their memories."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

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
from baton.engine.core.regions import CacheRegion


class Ticket(msgspec.Struct):
    peer: int
    transfer_id: TransferId


@dataclass
class Room:
    """The engines between which blocks can be copied."""

    peers: list[CopyConnector] = field(default_factory=list)

    def connect(self, region: CacheRegion) -> CopyConnector:
        """Return a connector; a factory for `build_engine`."""
        self.peers.append(CopyConnector(self, len(self.peers), region))
        return self.peers[-1]


class CopyConnector:
    """A connector that receives at once; `bytes_moved` counts the bytes received here."""

    def __init__(self, room: Room, name: int, region: CacheRegion) -> None:
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
        self.end(transfer_id, OfferOutcome.WITHDRAWN)

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        transfer_id = next(self.ids)
        wanted = msgspec.msgpack.decode(ticket, type=Ticket)
        peer = self.room.peers[wanted.peer]
        if wanted.transfer_id not in peer.offered:
            self.events += [ReceiveFailed(transfer_id, "the offer has ended"), BlocksReleased(transfer_id)]
            return transfer_id
        assert self.region.fingerprint == peer.region.fingerprint
        for source, target in zip(peer.offered[wanted.transfer_id][first_block:], block_ids, strict=True):
            self.copy(peer, source, target)
        peer.end(wanted.transfer_id, OfferOutcome.FINISHED)
        self.events.append(Received(transfer_id))
        return transfer_id

    def copy(self, peer: CopyConnector, source: int, target: int) -> None:
        (theirs, size), (ours, own_size) = place_of(peer.region, source), place_of(self.region, target)
        assert size == own_size, "a block of another cache group"
        if not self.skips(self.region, target):
            ctypes.memmove(ours, theirs, size)
        self.bytes_moved += size

    def skips(self, region: CacheRegion, block: int) -> bool:
        """Return whether a block is not copied, for tests of the consequences."""
        return False

    def cancel(self, transfer_id: TransferId) -> None:
        """Do nothing: a receive is complete when it returns."""

    def poll(self) -> list[ConnectorEvent]:
        events, self.events = self.events, []
        return events

    def end(self, transfer_id: TransferId, outcome: OfferOutcome) -> None:
        if self.offered.pop(transfer_id, None) is not None:
            self.events.append(OfferEnded(transfer_id, outcome))


class GrowingRoom(Room):
    """Engines that offer prompts while they compute them."""

    def connect(self, region: CacheRegion) -> CopyConnector:
        self.peers.append(GrowingCopyConnector(self, len(self.peers), region))
        return self.peers[-1]


class GrowingCopyConnector(CopyConnector, GrowingConnector):
    """A connector with early offers.

    Readers get the content that the offer has at its end; a written block must not change.
    """

    offers_early = True

    def __init__(self, room: Room, name: int, region: CacheRegion) -> None:
        super().__init__(room, name, region)
        self.written: dict[TransferId, list[bytes]] = {}

    def offer_growing(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        offer = self.offer(request_id, generation, block_ids, num_tokens)
        self.written[offer.transfer_id] = []
        return offer

    def advance(self, transfer_id: TransferId, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        if transfer_id not in self.offered:
            return
        blocks, written = self.offered[transfer_id], self.written[transfer_id]
        if last_blocks:
            assert num_ready == len(blocks), "the last blocks are named before all are written"
            blocks[-len(last_blocks) :] = last_blocks
        content = [ctypes.string_at(*place_of(self.region, block)) for block in blocks[:num_ready]]
        assert content[: len(written)] == written, "a block that was written has changed"
        self.written[transfer_id] = content


def place_of(region: CacheRegion, block: int) -> tuple[int, int]:
    """Return the address and size in bytes of a block, by its number across all arenas."""
    for arena, first in zip(region.arenas, region.first_blocks, strict=True):
        if block - first < arena.num_blocks:
            return arena.address + (block - first) * arena.block_bytes, arena.block_bytes
    raise AssertionError(f"there is no block {block}")

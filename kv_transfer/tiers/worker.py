"""Carries out moves between one rank's blocks, slots in the host's memory, and slots of files.

    pool <──copies──> host                          slots of the host tier, then a few that disks are reached through
                      host <──FileTransport──> disk

Whatever comes from a disk is checked against its digest before it gets near the pool.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from baton.engine.core.layout import KVRegion
from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import Tier

from ..copies.host_memory import HostMemory, open_copies
from ..errors import TransportError
from ..pacing import sleep_precisely
from ..transports import ByteRange, FileTransport, ReadState
from ..transports.nixl_file import NixlFile
from .books import Loss, Move
from .disk_files import ALONE, DiskFiles, DiskFull, Record, Seat
from .settings import TierSettings

logger = logging.getLogger(__name__)

PASSAGE_BYTES = 32 << 20  # of the host's memory, between pool and disk
PASSAGE_SLOTS = 64  # at most
WRITE_AGAIN_S = 30.0  # after a write failed, the disk is left alone for so long
PATIENCE_S = 30.0  # a disk that takes longer for one transfer is given up
POLL_S = 50e-6

Losses = list[Loss | None]  # of each move; None: it was carried out


class Disk:
    """The slots of a pair of files, reached through memory of the host."""

    def __init__(self, files: DiskFiles, transport: FileTransport, memory: HostMemory) -> None:
        self._files = files
        self._transport = transport
        self._memory = memory
        self._write_again_at = 0.0
        self._warned = False
        self.failed = False  # a read has not worked, or something has not ended: the device cannot be relied on

    @property
    def records(self) -> list[Record]:
        return self._files.records

    @property
    def num_slots(self) -> int:
        return self._files.num_slots

    def write(self, moves: Sequence[Move], memory_slots: Sequence[int]) -> Losses:
        """The slots of memory into those that the moves are to."""
        lost: Losses = [Loss.DISK_WRITE] * len(moves)
        if self.failed or time.monotonic() < self._write_again_at:
            return lost
        slots = [move.target_slot for move in moves]
        try:
            self._run(self._transport.write, slots, memory_slots)
            for move, memory_slot in zip(moves, memory_slots, strict=True):
                self._files.note(move.target_slot, move.block_hash, self._memory.view(memory_slot))
        except (TransportError, OSError) as error:
            self._write_again_at = time.monotonic() + WRITE_AGAIN_S
            if not self._warned:
                self._warned = True
                logger.warning("%s: a write failed; further ones are only counted: %s", self._files.path, error)
            return lost
        return [None] * len(moves)

    def read(self, moves: Sequence[Move], memory_slots: Sequence[int]) -> Losses:
        """The slots that the moves are from into those of memory."""
        if self.failed:
            return [Loss.DISK_READ] * len(moves)
        slots = [move.source_slot for move in moves]
        try:
            self._run(self._transport.read, slots, memory_slots)
        except TransportError as error:
            self.failed = True  # what was asked for might still come, into memory that is used again
            logger.error("%s: a read failed, the disk tier is off until the next start: %s", self._files.path, error)
            return [Loss.DISK_READ] * len(moves)
        views = map(self._memory.view, memory_slots)
        fits = [self._files.fits(slot, view) for slot, view in zip(slots, views, strict=True)]
        return [None if good else Loss.CORRUPT for good in fits]

    def note_use(self, used: Iterable[tuple[int, BlockHash]]) -> None:
        """Slots and what should be in them, in the order of their use."""
        try:
            for slot, block_hash in used:
                self._files.note_use(slot, block_hash)
        except OSError as error:
            logger.warning("%s: which blocks were used last is not kept: %s", self._files.path, error)

    def close(self) -> None:
        if not self.failed:  # otherwise something may still run that the transport knows of
            self._transport.close()
            self._files.close()

    def _run(
        self, start: Callable[[Sequence[ByteRange]], int], slots: Sequence[int], memory_slots: Sequence[int]
    ) -> None:
        """Waits for a transfer. Raises `TransportError`."""
        size = self._files.slot_bytes
        handle = start([ByteRange(slot * size, at * size, size) for slot, at in zip(slots, memory_slots, strict=True)])
        deadline = time.monotonic() + PATIENCE_S
        while (state := self._transport.poll(handle)) is ReadState.RUNNING:
            if time.monotonic() > deadline:
                self.failed = True
                raise TransportError(f"{len(slots)} blocks were not transferred within {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        self._transport.release(handle)
        if state is ReadState.FAILED:
            raise TransportError(f"{len(slots)} blocks were not transferred as a whole")


class Room(NamedTuple):
    """What a rank has got of the disk."""

    files: DiskFiles | None
    disk_full: str = ""  # why it has got nothing, where it should have


def take_room(region: KVRegion, settings: TierSettings, seat: Seat = ALONE) -> Room:
    """Raises `TierRefused`."""
    num_slots = settings.disk_bytes // region.block_bytes
    if not num_slots:
        return Room(None)
    try:
        return Room(DiskFiles(Path(settings.disk_path), region, num_slots, seat))
    except DiskFull as error:
        return Room(None, str(error))


class TierHands(Protocol):
    """Whoever carries out moves: one rank's share of each block, or all of it. One thread makes, uses and closes it."""

    num_host_slots: int
    disk_full: str  # why there is no disk tier, where there should be one

    @property
    def num_disk_slots(self) -> int: ...

    @property
    def kept(self) -> list[tuple[BlockHash, int]]:
        """What the disk has from earlier processes, and in which slots, the least recently used first."""
        ...

    @property
    def disk_failed(self) -> bool: ...

    def carry_out(self, moves: Sequence[Move]) -> Losses:
        """In order; what goes the same way goes together."""
        ...

    def note_use(self, used: Sequence[tuple[int, BlockHash]]) -> None:
        """Slots of the disk and what should be in them, in the order of their use."""
        ...

    def close(self) -> None: ...


class TierWorker:
    """The `TierHands` of one rank. Raises `TransportError`."""

    def __init__(self, region: KVRegion, settings: TierSettings, name: str, room: Room) -> None:
        self.num_host_slots = settings.host_bytes // region.block_bytes
        self.disk_full = room.disk_full
        files = room.files
        passage = min(PASSAGE_SLOTS, max(1, PASSAGE_BYTES // region.block_bytes)) if files else 0
        self._passage = range(self.num_host_slots, self.num_host_slots + passage)
        memory = HostMemory(max(1, self.num_host_slots + passage), region.block_bytes, region.device)
        self._copies = open_copies(region, memory)
        self._disk = None
        if files is not None:
            sleep_precisely()
            transport = NixlFile(name, files.fd, files.num_bytes, memory.address, memory.num_bytes)
            self._disk = Disk(files, transport, memory)

    @property
    def num_disk_slots(self) -> int:
        return self._disk.num_slots if self._disk else 0

    @property
    def kept(self) -> list[tuple[BlockHash, int]]:
        return [(record.block_hash, record.slot) for record in self._disk.records] if self._disk else []

    @property
    def disk_failed(self) -> bool:
        return self._disk is not None and self._disk.failed

    def carry_out(self, moves: Sequence[Move]) -> Losses:
        losses: Losses = []
        for (source, target), group in itertools.groupby(moves, key=lambda move: (move.source, move.target)):
            losses += self._carry_out_alike(source, target, list(group))
        return losses

    def note_use(self, used: Sequence[tuple[int, BlockHash]]) -> None:
        if self._disk is not None:
            self._disk.note_use(used)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _carry_out_alike(self, source: Tier, target: Tier, moves: list[Move]) -> Losses:
        match source, target:
            case Tier.POOL, Tier.HOST:
                self._copies.down([(move.source_slot, move.target_slot) for move in moves])
            case Tier.HOST, Tier.POOL:
                self._copies.up([(move.target_slot, move.source_slot) for move in moves])
            case Tier.HOST, Tier.DISK:
                return self._the_disk.write(moves, [move.source_slot for move in moves])
            case Tier.POOL, Tier.DISK:
                return self._through_passage(moves, self._down_to_disk)
            case Tier.DISK, Tier.POOL:
                return self._through_passage(moves, self._up_from_disk)
            case _:
                raise AssertionError(f"no way from {source} to {target}")
        return [None] * len(moves)

    def _through_passage(self, moves: list[Move], carry: Callable[[list[Move]], Losses]) -> Losses:
        size = len(self._passage)
        losses: Losses = []
        for start in range(0, len(moves), size):
            losses += carry(moves[start : start + size])
        return losses

    def _down_to_disk(self, moves: list[Move]) -> Losses:
        slots = self._passage[: len(moves)]
        self._copies.down([(move.source_slot, slot) for move, slot in zip(moves, slots, strict=True)])
        return self._the_disk.write(moves, slots)

    def _up_from_disk(self, moves: list[Move]) -> Losses:
        slots = self._passage[: len(moves)]
        losses = self._the_disk.read(moves, slots)
        found = zip(moves, slots, losses, strict=True)
        self._copies.up([(move.target_slot, slot) for move, slot, loss in found if loss is None])
        return losses

    @property
    def _the_disk(self) -> Disk:
        assert self._disk is not None, "the books know of no disk"
        return self._disk

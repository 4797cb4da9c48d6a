"""Carry out moves between one rank's blocks, slots in host memory, and slots of files.

    pool <──copies──> host                          slots of the host tier, and a few bounce slots
                      host <──FileTransport──> disk

A block from disk is checked against its digest before it is copied to the pool. Each cache group has its own memory and
files, and moves stay within a group.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import Tier

from ..block_copies import open_block_copier
from ..errors import TransportError
from ..host_memory import HostMemory
from ..pacing import sleep_precisely
from ..settings import TierSettings
from ..transports import ByteRange, FileTransport, ReadState
from ..transports.nixl_file import NixlFile
from .disk_files import SINGLE_RANK, DiskFiles, DiskFull, FileOwner, Record
from .division import GroupTiers, TierDivision
from .tier_index import Loss, Move, group_of

logger = logging.getLogger(__name__)

BOUNCE_BYTES = 32 << 20  # of host memory, through which blocks go between pool and disk
BOUNCE_SLOTS = 64  # at most
RETRY_WRITES_AFTER_S = 30.0  # pause after a failed write
TRANSFER_TIMEOUT_S = 30.0  # a disk that takes longer for one transfer is not used any more
POLL_S = 50e-6

Losses = list[Loss | None]  # one for each move; None: it was carried out


class Disk:
    """The slots of a pair of files. Blocks are written from, and read into, slots of host memory."""

    def __init__(self, files: DiskFiles, transport: FileTransport, memory: HostMemory) -> None:
        self._files = files
        self._transport = transport
        self._memory = memory
        self._retry_writes_at = 0.0
        self._warned = False
        self.failed = False  # a read has failed, or a transfer has not ended: do not use the disk any more

    @property
    def records(self) -> list[Record]:
        return self._files.records

    @property
    def num_slots(self) -> int:
        return self._files.num_slots

    def write(self, moves: Sequence[Move], memory_slots: Sequence[int]) -> Losses:
        """Write these slots of memory to the target slots of the moves."""
        lost: Losses = [Loss.DISK_WRITE] * len(moves)
        if self.failed or time.monotonic() < self._retry_writes_at:
            return lost
        slots = [move.target_slot for move in moves]
        try:
            self._run(self._transport.write, slots, memory_slots)
            for move, memory_slot in zip(moves, memory_slots, strict=True):
                self._files.note(move.target_slot, move.block_hash, self._memory.view(memory_slot))
        except (TransportError, OSError) as error:
            self._retry_writes_at = time.monotonic() + RETRY_WRITES_AFTER_S
            if not self._warned:
                self._warned = True
                logger.warning("%s: a write failed; further ones are only counted: %s", self._files.path, error)
            return lost
        return [None] * len(moves)

    def read(self, moves: Sequence[Move], memory_slots: Sequence[int]) -> Losses:
        """Read the source slots of the moves into these slots of memory, and check their digests."""
        if self.failed:
            return [Loss.DISK_READ] * len(moves)
        slots = [move.source_slot for move in moves]
        try:
            self._run(self._transport.read, slots, memory_slots)
        except TransportError as error:
            self.failed = True  # the read may still write into memory that the next one would use
            logger.error("%s: a read failed, the disk tier is off until the next start: %s", self._files.path, error)
            return [Loss.DISK_READ] * len(moves)
        views = map(self._memory.view, memory_slots)
        fits = [self._files.fits(slot, view) for slot, view in zip(slots, views, strict=True)]
        return [None if good else Loss.CORRUPT for good in fits]

    def note_use(self, used: Iterable[tuple[int, BlockHash]]) -> None:
        """Record uses of slots and their blocks, in order of use."""
        try:
            for slot, block_hash in used:
                self._files.note_use(slot, block_hash)
        except OSError as error:
            logger.warning("%s: the order in which blocks were used is not recorded: %s", self._files.path, error)

    def close(self) -> None:
        if not self.failed:  # otherwise a transfer may still run
            self._transport.close()
            self._files.close()

    def _run(
        self, start: Callable[[Sequence[ByteRange]], int], slots: Sequence[int], memory_slots: Sequence[int]
    ) -> None:
        """Run a transfer and wait for its end. Raises `TransportError`."""
        size = self._files.slot_bytes
        handle = start([ByteRange(slot * size, at * size, size) for slot, at in zip(slots, memory_slots, strict=True)])
        deadline = time.monotonic() + TRANSFER_TIMEOUT_S
        while (state := self._transport.poll(handle)) is ReadState.RUNNING or not self._transport.release(handle):
            if time.monotonic() > deadline:  # it may still run, and use memory that the next transfer would use
                self.failed = True
                raise TransportError(f"{len(slots)} blocks were not transferred within {TRANSFER_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        if state is ReadState.FAILED:
            raise TransportError(f"{len(slots)} blocks were not transferred as a whole")


class DiskSpace(NamedTuple):
    """A rank's files on the disk."""

    files: Sequence[DiskFiles]  # of each cache group; empty: there are none
    disk_full: str = ""  # why there are none although the settings ask for them

    @property
    def file_set(self) -> str:
        return self.files[0].file_set if self.files else ""


def take_disk_space(division: TierDivision, settings: TierSettings, owner: FileOwner = SINGLE_RANK) -> DiskSpace:
    """Open or create a rank's files of all cache groups, if the settings ask for a disk tier. Raises `TierRefused`.

    If the disk has no room for the files of all groups, there are none, since some groups alone restore nothing.
    """
    if not all(group.num_disk_slots for group in division.groups):
        return DiskSpace(())
    folder, files = Path(settings.disk_path).expanduser(), list[DiskFiles]()
    with contextlib.ExitStack() as failing:
        for group in division.groups:
            file_set = files[0].file_set if files else owner.file_set
            own = msgspec.structs.replace(owner, file_set=file_set, fingerprint=group.fingerprint)
            try:
                files.append(DiskFiles(folder / group.name, group.arena, group.num_disk_slots, own))
            except DiskFull as error:
                return DiskSpace((), str(error))
            failing.callback(files[-1].give_back)
        failing.pop_all()
    return DiskSpace(files)


KeptBlock = tuple[BlockHash, int]  # a block on the disk, and its slot


class TierMover(Protocol):
    """Moves blocks on one rank or on all ranks of a group. One thread makes, uses and closes it."""

    num_host_slots: list[int]  # of each group
    num_disk_slots: list[int]
    kept: list[list[KeptBlock]]  # of each group: blocks of earlier processes, the least recently used first
    disk_full: str  # why there is no disk tier although the settings ask for one

    @property
    def disk_failed(self) -> bool: ...

    def move(self, moves: Sequence[Move]) -> Losses:
        """Carry out moves in order. Consecutive ones with the same source and target tier go together."""
        ...

    def note_use(self, used: Sequence[tuple[int, BlockHash]]) -> None:
        """Record uses of slots of the disk and their blocks, in order of use."""
        ...

    def close(self) -> None: ...


class TierWorker:
    """The `TierMover` of one rank. Raises `TransportError`."""

    def __init__(self, division: TierDivision, name: str, space: DiskSpace) -> None:
        self.disk_full = space.disk_full
        self._division = division
        files: Sequence[DiskFiles | None] = space.files or [None] * len(division.groups)
        self._groups = [
            _GroupWorker(group, f"{name}:{group.name}" if group.name else name, own)
            for group, own in zip(division.groups, files, strict=True)
        ]
        self.num_host_slots = [group.num_host_slots for group in division.groups]
        self.num_disk_slots = [worker.num_disk_slots for worker in self._groups]
        firsts = division.firsts(Tier.DISK)
        self.kept = [
            [(record.block_hash, first + record.slot) for record in worker.records]
            for first, worker in zip(firsts, self._groups, strict=True)
        ]

    @property
    def disk_failed(self) -> bool:
        return any(worker.disk_failed for worker in self._groups)

    def move(self, moves: Sequence[Move]) -> Losses:
        if len(self._groups) == 1:
            return self._groups[0].move(moves)
        losses: Losses = []
        for group, some in itertools.groupby(moves, key=self._division.group_of):
            losses += self._groups[group].move([self._division.in_group(move, group) for move in some])
        return losses

    def note_use(self, used: Sequence[tuple[int, BlockHash]]) -> None:
        firsts = self._division.firsts(Tier.DISK)
        for group, some in itertools.groupby(used, key=lambda use: group_of(use[0], firsts)):
            self._groups[group].note_use([(slot - firsts[group], block_hash) for slot, block_hash in some])

    def close(self) -> None:
        for worker in self._groups:
            worker.close()


class _GroupWorker:
    """Moves blocks of one cache group between its arena, its host memory and its files."""

    def __init__(self, group: GroupTiers, name: str, files: DiskFiles | None) -> None:
        region = group.arena
        self.num_host_slots = group.num_host_slots
        num_bounce = min(BOUNCE_SLOTS, max(1, BOUNCE_BYTES // region.block_bytes)) if files else 0
        self._bounce_slots = range(self.num_host_slots, self.num_host_slots + num_bounce)
        memory = HostMemory(max(1, self.num_host_slots + num_bounce), region.block_bytes, region.device)
        self._copier = open_block_copier(region, memory)
        self._disk = None
        if files is not None:
            sleep_precisely()
            transport = NixlFile(name, files.fd, files.num_bytes, memory.address, memory.num_bytes)
            self._disk = Disk(files, transport, memory)

    @property
    def num_disk_slots(self) -> int:
        return self._disk.num_slots if self._disk else 0

    @property
    def records(self) -> Sequence[Record]:
        """The blocks that earlier processes left on the disk, the least recently used first."""
        return self._disk.records if self._disk else ()

    @property
    def disk_failed(self) -> bool:
        return self._disk is not None and self._disk.failed

    def move(self, moves: Sequence[Move]) -> Losses:
        losses: Losses = []
        for (source, target), group in itertools.groupby(moves, key=lambda move: (move.source, move.target)):
            losses += self._move_alike(source, target, list(group))
        return losses

    def note_use(self, used: Sequence[tuple[int, BlockHash]]) -> None:
        if self._disk is not None:
            self._disk.note_use(used)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    def _move_alike(self, source: Tier, target: Tier, moves: list[Move]) -> Losses:
        match source, target:
            case Tier.POOL, Tier.HOST:
                self._copier.down([(move.source_slot, move.target_slot) for move in moves])
            case Tier.HOST, Tier.POOL:
                self._copier.up([(move.target_slot, move.source_slot) for move in moves])
            case Tier.HOST, Tier.DISK:
                return self._the_disk.write(moves, [move.source_slot for move in moves])
            case Tier.POOL, Tier.DISK:
                return self._by_batches(moves, self._down_to_disk)
            case Tier.DISK, Tier.POOL:
                return self._by_batches(moves, self._up_from_disk)
            case _:
                raise AssertionError(f"no way from {source} to {target}")
        return [None] * len(moves)

    def _by_batches(self, moves: list[Move], move: Callable[[list[Move]], Losses]) -> Losses:
        size = len(self._bounce_slots)
        losses: Losses = []
        for start in range(0, len(moves), size):
            losses += move(moves[start : start + size])
        return losses

    def _down_to_disk(self, moves: list[Move]) -> Losses:
        slots = self._bounce_slots[: len(moves)]
        self._copier.down([(move.source_slot, slot) for move, slot in zip(moves, slots, strict=True)])
        return self._the_disk.write(moves, slots)

    def _up_from_disk(self, moves: list[Move]) -> Losses:
        slots = self._bounce_slots[: len(moves)]
        losses = self._the_disk.read(moves, slots)
        found = zip(moves, slots, losses, strict=True)
        self._copier.up([(move.target_slot, slot) for move, slot, loss in found if loss is None])
        return losses

    @property
    def _the_disk(self) -> Disk:
        assert self._disk is not None, "the index has no slots on a disk"
        return self._disk

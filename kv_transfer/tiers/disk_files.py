"""The two files of one rank and cache group on a disk: blocks in slots, and an index of which block is in which slot.

    blocks-3.kv       slot 0 | slot 1 | ...                         each the size of this rank's share of a block
    blocks-3.index    header (4096 bytes) | record 0 | record 1 | ...   64 bytes each

    record            hash of the prefix | digest of the slot's bytes | number | digest of the record

The header is text: `head -c 4096`. A slot is written before its record. If a process is killed in between, the slot's
digest differs from the one in its old record, and the next read discards the block. Nothing is ever flushed, so the
same check covers a power failure. Numbers tell which of two records of a block is newer, and which block was used last:
when a block is used, its record is written again with a higher number.

An engine keeps the index of its files locked, and the lock ends with the process. Rank 0 takes the first pair in the
folder that is not locked and was written for the same kind of blocks, or creates a new one. The pairs of all ranks and
cache groups of an engine form a *set*: the other ranks take or create their pair of rank 0's set, and so does each
further cache group, in a folder of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from baton.engine.core.prefix import HASH_BYTES, BlockHash
from baton.engine.core.regions import ArenaRegion

from ..errors import TransferError

logger = logging.getLogger(__name__)

FORMAT = 2
HEADER_BYTES = 4096
DIGEST_BYTES = 16
_FIELDS = struct.Struct(f"<{HASH_BYTES}s{DIGEST_BYTES}sQ")
_CHECK = struct.Struct("<Q")
RECORD_BYTES = 64
LOCKED_FOR_S = 5.0  # wait so long for the lock of a process that is about to end
LOCKED_AGAIN_S = 0.1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TierRefused(TransferError):
    """A setting of tiers cannot work. The message says why, and what to change."""


class DiskFull(TransferError):
    """The disk has no room for the tier."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a pair of files: the kind of blocks that it holds, and its owner."""

    format: int
    fingerprint: str  # of the layout: model, type, block size, version; with several groups also kind and layers
    model: str  # for people who read the header
    rank: int
    num_ranks: int
    first_head: int
    num_heads: int
    slot_bytes: int
    file_set: str  # the same in the files of all ranks of an engine

    @classmethod
    def of(cls, region: ArenaRegion, owner: FileOwner) -> Self:
        return cls(
            format=FORMAT,
            fingerprint=owner.fingerprint or region.layout.fingerprint,
            model=region.layout.model,
            rank=owner.rank,
            num_ranks=owner.num_ranks,
            first_head=region.first_head,
            num_heads=region.num_heads,
            slot_bytes=region.block_bytes,
            file_set=owner.file_set,
        )

    def encode(self) -> bytes:
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        return text.ljust(HEADER_BYTES - 1) + b"\n"


OF_ALL_RANKS = ("format", "fingerprint", "model", "num_ranks", "num_heads", "slot_bytes")


class FileOwner(msgspec.Struct, frozen=True):
    """The rank and the cache group for which to open files."""

    rank: int = 0
    num_ranks: int = 1
    file_set: str = ""  # rank 0's set; empty: any set that is not locked
    fingerprint: str = ""  # of the cache group; empty: of the layout


SINGLE_RANK = FileOwner()


class Record(msgspec.Struct, frozen=True):
    slot: int
    block_hash: BlockHash
    digest: bytes
    number: int  # order of the last write or use


def digest_of(data: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


class DiskFiles:
    """A locked pair of files with space for `num_slots` blocks.

    `records` are the blocks that earlier processes left, the least recently used first.

    Raises `TierRefused` for a folder that cannot be used, and `DiskFull` if the disk has too little space.
    """

    def __init__(self, folder: Path, region: ArenaRegion, num_slots: int, owner: FileOwner = SINGLE_RANK) -> None:
        self.slot_bytes = region.block_bytes
        self.num_slots = num_slots
        self._sizes_before: dict[int, int] = {}  # of each file, before we allocated
        wanted = Header.of(region, owner)
        self._kept: dict[int, Record] = {}  # by slot
        with contextlib.ExitStack() as failing:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.path, self._index, self._header = _open_pair(folder, wanted)
                failing.callback(os.close, self._index)
                self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
                failing.callback(os.close, self.fd)
                self._allocate()
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise DiskFull(f"{folder}: no room for {num_slots * self.slot_bytes} bytes: {error}") from error
                raise TierRefused(
                    f"kv_tiers.disk_path: {folder}: {error}; give a folder that engines can write to"
                ) from error
            self.records = self._read_records()
            failing.pop_all()
        self._numbers = itertools.count(self.records[-1].number + 1 if self.records else 1)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def file_set(self) -> str:
        return self._header.file_set

    def note(self, slot: int, block_hash: BlockHash, data: memoryview) -> None:
        """Record that `data` has been written to a slot. Raises `OSError`."""
        self._write(Record(slot, block_hash, digest_of(data), next(self._numbers)))

    def note_use(self, slot: int, block_hash: BlockHash) -> None:
        """Record a use of the block, unless the slot holds another block by now. Raises `OSError`."""
        known = self._kept.get(slot)
        if known is not None and known.block_hash == block_hash:
            self._write(msgspec.structs.replace(known, number=next(self._numbers)))

    def fits(self, slot: int, data: memoryview) -> bool:
        """Return whether `data`, as read from the slot, matches the digest of what was written."""
        known = self._kept.get(slot)
        return known is not None and digest_of(data) == known.digest

    def give_back(self) -> None:
        """Close files that will not be used, and free the space that was allocated for them."""
        for file, num_bytes in self._sizes_before.items():
            os.truncate(file, num_bytes)
        self.close()

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._index)

    def _allocate(self) -> None:
        """Allocate all of the space now, so that a disk that fills up later does no harm."""
        for file, num_bytes in ((self._index, HEADER_BYTES + self.num_slots * RECORD_BYTES), (self.fd, self.num_bytes)):
            before = self._sizes_before[file] = os.fstat(file).st_size
            try:
                os.posix_fallocate(file, 0, num_bytes)
            except OSError:
                os.truncate(file, min(before, num_bytes))
                raise
            os.truncate(file, num_bytes)

    def _read_records(self) -> list[Record]:
        found: dict[BlockHash, Record] = {}
        for record in self._valid_records():
            known = found.get(record.block_hash)
            if known is None or known.number < record.number:
                found[record.block_hash] = record
        records = sorted(found.values(), key=lambda record: record.number)
        self._kept = {record.slot: record for record in records}
        return records

    def _valid_records(self) -> Iterator[Record]:
        data = os.pread(self._index, self.num_slots * RECORD_BYTES, HEADER_BYTES)
        for slot in range(len(data) // RECORD_BYTES):
            start = slot * RECORD_BYTES
            fields = data[start : start + _FIELDS.size]
            (check,) = _CHECK.unpack_from(data, start + _FIELDS.size)
            block_hash, digest, number = _FIELDS.unpack(fields)
            if number and check == self._check(fields):
                yield Record(slot, block_hash, digest, number)

    def _check(self, fields: bytes) -> int:
        return xxhash.xxh3_64_intdigest(fields + self._header.fingerprint.encode())

    def _write(self, record: Record) -> None:
        fields = _FIELDS.pack(record.block_hash, record.digest, record.number)
        data = fields + _CHECK.pack(self._check(fields))
        os.pwrite(self._index, data, HEADER_BYTES + record.slot * RECORD_BYTES)
        self._kept[record.slot] = record


def _open_pair(folder: Path, wanted: Header) -> tuple[Path, int, Header]:
    """Return the path of the file of blocks, the locked index's descriptor, and its header. Raises `OSError`."""
    known = sorted(folder.glob("blocks-*.index"), key=lambda path: (len(path.name), path.name))
    for path in known:
        found = _usable_header(path, wanted)
        if found is not None:
            index = _locked(path, LOCKED_FOR_S if wanted.file_set else 0.0)
            if index is not None:
                return path.with_suffix(".kv"), index, found
    return _create_pair(
        folder, wanted if wanted.file_set else msgspec.structs.replace(wanted, file_set=secrets.token_hex(8))
    )


def _create_pair(folder: Path, header: Header) -> tuple[Path, int, Header]:
    """Create a pair under the first free number. Raises `OSError`."""
    for number in itertools.count():
        path = folder / f"blocks-{number}.index"
        index = _locked(path, 0.0, os.O_CREAT)
        if index is None:
            continue
        if os.fstat(index).st_size == 0:
            if os.pwrite(index, header.encode(), 0) < HEADER_BYTES:
                os.truncate(index, 0)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return path.with_suffix(".kv"), index, header
        os.close(index)
    raise AssertionError("numbers do not end")


def _locked(path: Path, timeout_s: float, flags: int = 0) -> int | None:
    """Open and lock an index. Returns None if another process keeps it locked. Raises `OSError`."""
    index = os.open(path, os.O_RDWR | flags, 0o600)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(index)
                return None
            time.sleep(LOCKED_AGAIN_S)
        else:
            return index


def _usable_header(path: Path, wanted: Header) -> Header | None:
    """Return the header if the files can be used. Rank 0 logs files that no rank can use, and leaves them there."""
    with path.open("rb") as index:
        text = index.read(HEADER_BYTES)
    if not text:  # another process is just creating it
        return None
    try:
        found = msgspec.json.decode(text, type=Header)
    except msgspec.DecodeError:
        problem = "it holds no header of this version"
    else:
        differing = [name for name in OF_ALL_RANKS if getattr(found, name) != getattr(wanted, name)]
        if not differing:
            ours = found.rank == wanted.rank and wanted.file_set in ("", found.file_set)
            return found if ours else None
        pairs = (f"{name} is {getattr(found, name)!r}, not {getattr(wanted, name)!r}" for name in differing)
        problem = f"it was written for other blocks ({'; '.join(pairs)})"
    if wanted.rank == 0:
        logger.warning("%s is not used: %s. Delete it with its .kv file if no engine needs them.", path, problem)
    return None

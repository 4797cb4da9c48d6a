"""An engine's two files on a disk: blocks in slots, and an index that says which block is where.

    blocks-3.kv       slot 0 | slot 1 | ...                         each as large as this rank's share of a block
    blocks-3.index    header (4096 bytes) | record 0 | record 1 | ...   64 bytes each

    record            hash of the prefix | digest of the slot's bytes | number of the write | digest of the record

The header is text: `head -c 4096`. A slot is written before its record. So after a process was killed a record either
fits to its slot, or the digest of the slot is another: then the slot is worthless, which whoever reads it finds out.
Nothing is ever flushed; after a power failure it is the digests again that tell.

Whoever uses the files keeps the index locked, and the lock ends with the process. An engine takes the first pair in the
folder that nobody uses and that was written for the same blocks, or else begins a new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from baton.engine.core.layout import KVRegion
from baton.engine.core.prefix import HASH_BYTES, BlockHash

from ..errors import TransferError

logger = logging.getLogger(__name__)

FORMAT = 1
HEADER_BYTES = 4096
DIGEST_BYTES = 16
_FIELDS = struct.Struct(f"<{HASH_BYTES}s{DIGEST_BYTES}sQ")
_CHECK = struct.Struct("<Q")
RECORD_BYTES = 64
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TierRefused(TransferError):
    """A setting cannot be used: what was found, and what to change."""


class DiskFull(TransferError):
    """The disk has no room for the tier."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """For whose blocks a pair of files was made."""

    format: int
    fingerprint: str  # of the layout: model, type, block size and version
    model: str  # for people
    first_head: int
    num_heads: int
    slot_bytes: int

    @classmethod
    def of(cls, region: KVRegion) -> Self:
        return cls(
            format=FORMAT,
            fingerprint=region.layout.fingerprint,
            model=region.layout.model,
            first_head=region.first_head,
            num_heads=region.num_heads,
            slot_bytes=region.block_bytes,
        )

    def encode(self) -> bytes:
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        return text.ljust(HEADER_BYTES - 1) + b"\n"


class Record(msgspec.Struct, frozen=True):
    slot: int
    block_hash: BlockHash
    digest: bytes
    number: int  # of the write: newer ones have higher numbers


def digest_of(data: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


class DiskFiles:
    """A locked pair of files with room for `num_slots` blocks; `records` are those of earlier processes, oldest first.

    Raises `TierRefused` for a folder that cannot be used, `DiskFull` where the room cannot be had.
    """

    def __init__(self, folder: Path, region: KVRegion, num_slots: int) -> None:
        self.slot_bytes = region.block_bytes
        self.num_slots = num_slots
        self._header = Header.of(region)
        self._digests: dict[int, bytes] = {}
        with contextlib.ExitStack() as failing:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self.path, self._index = _claim(folder, self._header)
                failing.callback(os.close, self._index)
                self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
                failing.callback(os.close, self.fd)
                self._make_room()
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

    def note(self, slot: int, block_hash: BlockHash, data: memoryview) -> None:
        """Says what the slot holds now: `data`, which has been written. Raises `OSError`."""
        digest = digest_of(data)
        fields = _FIELDS.pack(block_hash, digest, next(self._numbers))
        self._write_record(slot, fields + _CHECK.pack(self._check(fields)))
        self._digests[slot] = digest

    def fits(self, slot: int, data: memoryview) -> bool:
        """Whether `data`, which has been read from the slot, is what was written."""
        return digest_of(data) == self._digests.get(slot)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._index)

    def _make_room(self) -> None:
        """Takes all of the room now: a disk that fills up later does no harm."""
        for file, num_bytes in ((self._index, HEADER_BYTES + self.num_slots * RECORD_BYTES), (self.fd, self.num_bytes)):
            before = os.fstat(file).st_size
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
        self._digests = {record.slot: record.digest for record in records}
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

    def _write_record(self, slot: int, data: bytes) -> None:
        os.pwrite(self._index, data, HEADER_BYTES + slot * RECORD_BYTES)


def _claim(folder: Path, header: Header) -> tuple[Path, int]:
    """The file of blocks, and the locked index beside it. Raises `OSError`."""
    known = sorted(folder.glob("blocks-*.index"), key=lambda path: (len(path.name), path.name))
    further = (folder / f"blocks-{number}.index" for number in itertools.count())
    for path in itertools.chain(known, (path for path in further if path not in known)):
        index = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if _lock(index) and _is_for(path, index, header):
            return path.with_suffix(".kv"), index
        os.close(index)
    raise AssertionError("numbers do not end")


def _lock(index: int) -> bool:
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_for(path: Path, index: int, header: Header) -> bool:
    """A file without a header is anyone's. Says so where the files are another's; they stay as they are."""
    text = os.pread(index, HEADER_BYTES, 0)
    if not text and os.pwrite(index, header.encode(), 0) < HEADER_BYTES:
        os.truncate(index, 0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    if not text or text == header.encode():
        return True
    try:
        found = msgspec.json.decode(text, type=Header)
    except msgspec.DecodeError:
        what = "it holds no header of this version"
    else:
        differing = [name for name in Header.__struct_fields__ if getattr(found, name) != getattr(header, name)]
        pairs = (f"{name} is {getattr(found, name)!r}, not {getattr(header, name)!r}" for name in differing)
        what = f"it was written for other blocks ({'; '.join(pairs)})"
    logger.warning("%s is not used: %s. Delete it with its .kv file if no engine needs them.", path, what)
    return False

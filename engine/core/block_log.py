"""News of which prefixes an engine has cached, for those who choose engines.

    BlockPool ── stored, evicted ──> BlockLog ── take() ──> BlocksChanged(5), BlocksChanged(6), ... ──> a mirror
                                         └── snapshot() ──> BlocksCached(6) ─────────────────────────────^

Numbers count what was taken. A mirror that misses one asks for a snapshot, and goes on with the number behind it.

Names of blocks are the first 8 bytes of their hashes: a mirror that takes one block for another only sends a request to
a colder engine, and that happens once in 2^64 / (blocks of all engines) lookups.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable

import msgspec

from .prefix import BlockHash

NAME_BYTES = 8


def pack_names(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join([block_hash[:NAME_BYTES] for block_hash in hashes])


def unpack_names(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // NAME_BYTES}Q", packed)


class BlocksChanged(msgspec.Struct, frozen=True, tag="changed", omit_defaults=True):
    """What differs from the state with the number before. No block is in both."""

    number: int
    stored: bytes = b""  # packed names
    evicted: bytes = b""

    def __post_init__(self) -> None:
        _check_names(self.stored)
        _check_names(self.evicted)


class BlocksCached(msgspec.Struct, frozen=True, tag="cached"):
    """Everything that is cached in the state of this number."""

    number: int
    stored: bytes

    def __post_init__(self) -> None:
        _check_names(self.stored)


BlockNews = BlocksChanged | BlocksCached


class BlockLog:
    """Net changes since the last `take`: at most two a block, however long nobody takes them.

    `cached` is the pool's own set of hashes, seen as it is at any time.
    """

    def __init__(self, cached: Collection[BlockHash]) -> None:
        self._cached = cached
        self._is_stored: dict[BlockHash, bool] = {}  # False: evicted
        self._number = 0

    def stored(self, block_hash: BlockHash) -> None:
        if self._is_stored.pop(block_hash, None) is None:
            self._is_stored[block_hash] = True

    def evicted(self, block_hash: BlockHash) -> None:
        if self._is_stored.pop(block_hash, None) is None:
            self._is_stored[block_hash] = False

    def take(self) -> BlocksChanged | None:
        """What changed since the last call; None where nothing did."""
        if not self._is_stored:
            return None
        self._number += 1
        changes = BlocksChanged(
            self._number,
            pack_names(block_hash for block_hash, stored in self._is_stored.items() if stored),
            pack_names(block_hash for block_hash, stored in self._is_stored.items() if not stored),
        )
        self._is_stored.clear()
        return changes

    def snapshot(self) -> BlocksCached:
        """The state after the last `take`, which must have been a moment ago: changes not taken belong to no number."""
        assert not self._is_stored, "take changes before a snapshot, and send them to those who have the state before"
        return BlocksCached(self._number, pack_names(self._cached))


def _check_names(packed: bytes) -> None:
    if len(packed) % NAME_BYTES:
        raise ValueError(f"{len(packed)} bytes are no names of blocks: those have {NAME_BYTES} bytes each")

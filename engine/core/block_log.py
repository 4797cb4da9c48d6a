"""The changes of an engine's cached prefixes, published for the routers of gateways.

    BlockPool ── stored, evicted ──> BlockLog ── take() ──> BlocksChanged(5), BlocksChanged(6), ... ──> a mirror
    KVTiers ────── kept, lost ─────────^  └── snapshot() ──> BlocksCached(6) ────────────────────────────^

A gateway's copy of the index is a *mirror*. A block is published under the best place that holds it: the pool, else the
host's memory, else the disk. A block that is evicted from the pool while the host's memory has a copy is published as
moved there; a copy of a block that is still in the pool is not published.

Every message has the next number. A mirror that misses one asks for a snapshot, and continues with the number after it.

Messages name a block by the first 8 bytes of its hash. If a mirror confuses two blocks, the only harm is a request sent
to an engine that has less of its prefix cached, and that happens once in 2^64 / (blocks of all engines) lookups.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable

import msgspec

from .prefix import BlockHash
from .tiers import KVTiers, Tier

NAME_BYTES = 8


def pack_names(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join([block_hash[:NAME_BYTES] for block_hash in hashes])


def unpack_names(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // NAME_BYTES}Q", packed)


class BlocksChanged(msgspec.Struct, frozen=True, tag="changed", omit_defaults=True):
    """The changes since the message before: the packed names of blocks, by their new place. No block is named twice."""

    number: int
    stored: bytes = b""  # in the pool
    evicted: bytes = b""  # no longer cached anywhere
    host: bytes = b""
    disk: bytes = b""

    def __post_init__(self) -> None:
        _check_names(self.stored, self.evicted, self.host, self.disk)


class BlocksCached(msgspec.Struct, frozen=True, tag="cached", omit_defaults=True):
    """All cached blocks as of message `number`, by place."""

    number: int
    stored: bytes  # in the pool
    host: bytes = b""
    disk: bytes = b""

    def __post_init__(self) -> None:
        _check_names(self.stored, self.host, self.disk)


BlockUpdate = BlocksChanged | BlocksCached


class BlockLog:
    """Net changes since the last `take`: a block that left and came back is no change.

    It watches the pool and the tiers. `cached` is a live view of the hashes in the pool.
    """

    def __init__(self, cached: Collection[BlockHash], tiers: KVTiers | None = None) -> None:
        self._cached = cached
        self._tiers = tiers
        self._moves: dict[BlockHash, tuple[Tier | None, Tier | None]] = {}  # the place at the last `take`, and now
        self._number = 0

    @property
    def number(self) -> int:
        """The number of the last message."""
        return self._number

    def stored(self, block_hash: BlockHash) -> None:
        self._move(block_hash, self._tier_of(block_hash), Tier.POOL)

    def evicted(self, block_hash: BlockHash) -> None:
        self._move(block_hash, Tier.POOL, self._tier_of(block_hash))

    def kept(self, block_hash: BlockHash, tier: Tier) -> None:
        if block_hash not in self._cached:
            self._move(block_hash, None, tier)

    def lost(self, block_hash: BlockHash, tier: Tier) -> None:
        if block_hash not in self._cached:
            self._move(block_hash, tier, None)

    def take(self) -> BlocksChanged | None:
        """Return the changes since the last call; None if there are none."""
        if not self._moves:
            return None
        self._number += 1
        now: dict[Tier | None, list[BlockHash]] = {None: [], **{tier: [] for tier in Tier}}
        for block_hash, (_, place) in self._moves.items():
            now[place].append(block_hash)
        self._moves.clear()
        packed = (pack_names(now[place]) for place in (Tier.POOL, None, Tier.HOST, Tier.DISK))
        return BlocksChanged(self._number, *packed)

    def snapshot(self) -> BlocksCached:
        """Return all cached blocks. Call it right after `take`, whose message has the snapshot's number."""
        assert not self._moves, "take changes before a snapshot, and send them to those who have the state before"
        below = (pack_names(self._only_in(tier)) for tier in (Tier.HOST, Tier.DISK))
        return BlocksCached(self._number, pack_names(self._cached), *below)

    def _move(self, block_hash: BlockHash, before: Tier | None, now: Tier | None) -> None:
        published, _ = self._moves.pop(block_hash, (before, now))
        if published is not now:
            self._moves[block_hash] = published, now

    def _tier_of(self, block_hash: BlockHash) -> Tier | None:
        return None if self._tiers is None else self._tiers.tier_of(block_hash)

    def _only_in(self, tier: Tier) -> list[BlockHash]:
        kept, cached = () if self._tiers is None else self._tiers.kept_in(tier), self._cached
        return [block_hash for block_hash in kept if block_hash not in cached]


def _check_names(*packed: bytes) -> None:
    for names in packed:
        if len(names) % NAME_BYTES:
            raise ValueError(f"{len(names)} bytes are not names of blocks, which have {NAME_BYTES} bytes each")

"""The changes of an engine's cached prefixes, published for the routers of gateways.

    BlockPool ── stored, evicted ──> GroupLog ──> BlockLog ── take() ──> BlocksChanged(5), BlocksChanged(6) ──> a mirror
    KVTiers ────── kept, lost ─────────^   one a     └── snapshot() ──> BlocksCached(6) ─────────────────────────^
                                         cache group

A gateway's copy of the index is a *mirror*. A block is published under the best place that holds it: the pool, else the
host's memory, else the disk. A block that is evicted from the pool while the host's memory has a copy is published as
moved there; a copy of a block that is still in the pool is not published.

If the layers of a model keep different parts of a sequence, every cache group publishes its own blocks, and a snapshot
says which of them a prefix hit needs (`HitRule`). A checkpoint of a state has the name of the block that ends there.
With a single group whose layers read all tokens, messages have neither rules nor groups.

Every message has the next number. A mirror that misses one asks for a snapshot, and continues with the number after it.

Messages name a block by the first 8 bytes of its hash. If a mirror confuses two blocks, the only harm is a request sent
to an engine that has less of its prefix cached, and that happens once in 2^64 / (blocks of all engines) lookups.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence

import msgspec

from .prefix import BlockHash
from .tiers import KVTiers, Tier

NAME_BYTES = 8


def pack_names(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join([block_hash[:NAME_BYTES] for block_hash in hashes])


def unpack_names(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // NAME_BYTES}Q", packed)


class HitRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """The blocks of a cache group that a prefix hit needs: all of its blocks, unless a field says otherwise."""

    window_blocks: int | None = None  # only its last ones, so many: those that the next token sees
    checkpoint_blocks: int | None = None  # only its last one, and its length is a multiple of this number

    def __post_init__(self) -> None:
        if self.window_blocks is not None and self.checkpoint_blocks is not None:
            raise ValueError("a cache group has either a window or checkpoints")
        if (self.window_blocks or 0) < 0 or (self.checkpoint_blocks is not None and self.checkpoint_blocks < 1):
            raise ValueError(f"{self} has a number of blocks that no cache group can have")

    @property
    def needs_all(self) -> bool:
        return self.window_blocks is None and self.checkpoint_blocks is None


class GroupBlocks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The packed names of one cache group's blocks, by place. In `BlocksChanged`: of those that moved there."""

    stored: bytes = b""  # in the pool
    evicted: bytes = b""  # no longer cached anywhere
    host: bytes = b""
    disk: bytes = b""

    def __post_init__(self) -> None:
        _check_names(self.stored, self.evicted, self.host, self.disk)


class BlocksChanged(msgspec.Struct, frozen=True, tag="changed", omit_defaults=True):
    """The changes since the message before: the packed names of blocks, by their new place.

    No block of a group is named twice. The fields of places are the first group's.
    """

    number: int
    stored: bytes = b""  # in the pool
    evicted: bytes = b""  # no longer cached anywhere
    host: bytes = b""
    disk: bytes = b""
    groups: list[GroupBlocks] = []  # all groups after the first; empty: nothing of these has changed

    def __post_init__(self) -> None:
        _check_names(self.stored, self.evicted, self.host, self.disk)


class BlocksCached(msgspec.Struct, frozen=True, tag="cached", omit_defaults=True):
    """All cached blocks as of message `number`, by place. The fields of places are the first group's."""

    number: int
    stored: bytes  # in the pool
    host: bytes = b""
    disk: bytes = b""
    rules: list[HitRule] = []  # of all groups; empty: only the first is published, and a hit needs all of its blocks
    groups: list[GroupBlocks] = []  # all groups after the first

    def __post_init__(self) -> None:
        _check_names(self.stored, self.host, self.disk)
        if len(self.groups) != max(0, len(self.rules) - 1):
            raise ValueError(f"{len(self.rules)} rules do not fit {len(self.groups)} groups after the first")


BlockUpdate = BlocksChanged | BlocksCached


class GroupLog:
    """The net changes of one cache group since the last `take`: a block that left and came back is no change.

    It watches the group's pool and tiers. `cached` is a live view of the hashes in the pool.
    """

    def __init__(self, cached: Collection[BlockHash], tiers: KVTiers | None = None, group: int = 0) -> None:
        self._cached = cached
        self._tiers = tiers
        self._group = group
        self._moves: dict[BlockHash, tuple[Tier | None, Tier | None]] = {}  # the place at the last `take`, and now

    @property
    def has_changes(self) -> bool:
        return bool(self._moves)

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

    def take(self) -> GroupBlocks:
        """Return the changes since the last call."""
        now: dict[Tier | None, list[BlockHash]] = {None: [], **{tier: [] for tier in Tier}}
        for block_hash, (_, place) in self._moves.items():
            now[place].append(block_hash)
        self._moves.clear()
        return GroupBlocks(*(pack_names(now[place]) for place in (Tier.POOL, None, Tier.HOST, Tier.DISK)))

    def all(self) -> GroupBlocks:
        """Return all cached blocks."""
        host, disk = (pack_names(self._only_in(tier)) for tier in (Tier.HOST, Tier.DISK))
        return GroupBlocks(pack_names(self._cached), host=host, disk=disk)

    def _move(self, block_hash: BlockHash, before: Tier | None, now: Tier | None) -> None:
        published, _ = self._moves.pop(block_hash, (before, now))
        if published is not now:
            self._moves[block_hash] = published, now

    def _tier_of(self, block_hash: BlockHash) -> Tier | None:
        return None if self._tiers is None else self._tiers.tier_of(block_hash, self._group)

    def _only_in(self, tier: Tier) -> list[BlockHash]:
        kept, cached = () if self._tiers is None else self._tiers.kept_in(tier, self._group), self._cached
        return [block_hash for block_hash in kept if block_hash not in cached]


class BlockLog:
    """The messages about an engine's cached blocks, made of the logs of its cache groups."""

    def __init__(self, groups: Sequence[GroupLog], rules: Sequence[HitRule] = ()) -> None:
        """`rules`: of all groups. None are needed for a single group if a hit needs all of its blocks."""
        self._groups, self._rules = groups, list(rules)
        self._number = 0

    @property
    def number(self) -> int:
        """The number of the last message."""
        return self._number

    def take(self) -> BlocksChanged | None:
        """Return the changes since the last call; None if there are none."""
        if not any(group.has_changes for group in self._groups):
            return None
        self._number += 1
        others_changed = any(group.has_changes for group in self._groups[1:])
        first, *others = (group.take() for group in self._groups)
        moved = (first.stored, first.evicted, first.host, first.disk)
        return BlocksChanged(self._number, *moved, others if others_changed else [])

    def snapshot(self) -> BlocksCached:
        """Return all cached blocks. Call it right after `take`, whose message has the snapshot's number."""
        assert not any(group.has_changes for group in self._groups), (
            "take changes before a snapshot, and send them to those who have the state before"
        )
        first, *others = (group.all() for group in self._groups)
        return BlocksCached(self._number, first.stored, first.host, first.disk, self._rules, others)


def _check_names(*packed: bytes) -> None:
    for names in packed:
        if len(names) % NAME_BYTES:
            raise ValueError(f"{len(names)} bytes are not names of blocks, which have {NAME_BYTES} bytes each")

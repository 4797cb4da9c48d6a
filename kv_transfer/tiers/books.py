"""Which block lies in which tier, and what has to move when one more comes. No I/O.

    store      pool ──> host                                 where there is a host tier
                        host ──> disk                        first, for the block that had the slot
               pool ──> disk                                 where there is none
    restore    host | disk ──> pool                          the block stays where it is, as the last to go
    save       host ──> disk                                 at the end, what was used last comes first

A block lies in one tier. Moves are carried out in the order in which they were asked for, except that restores may
overtake: their slots are pinned.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import Tier, TierWatcher

from .shelf import Shelf


class Loss(enum.StrEnum):
    """Why a block is not where it was to be."""

    BUSY = "busy"  # every slot was being read or written
    CORRUPT = "corrupt"  # the digest is another
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    DISK_FULL = "disk_full"


class Move(NamedTuple):
    block_hash: BlockHash
    source: Tier
    source_slot: int  # or block of the pool
    target: Tier
    target_slot: int


class _Watchers(TierWatcher):
    """All who asked to be told."""

    def __init__(self) -> None:
        self.all: list[TierWatcher] = []

    def kept(self, block_hash: BlockHash, tier: Tier) -> None:
        for watcher in self.all:
            watcher.kept(block_hash, tier)

    def lost(self, block_hash: BlockHash, tier: Tier) -> None:
        for watcher in self.all:
            watcher.lost(block_hash, tier)


class TierBooks:
    def __init__(self, num_host_slots: int, num_disk_slots: int, on_disk: Iterable[tuple[BlockHash, int]] = ()) -> None:
        """`on_disk`: blocks and slots of an earlier process, the least recently used first."""
        self._watchers = _Watchers()
        self._shelves = {
            Tier.HOST: Shelf(Tier.HOST, num_host_slots, self._watchers),
            Tier.DISK: Shelf(Tier.DISK, num_disk_slots, self._watchers, on_disk),
        }
        self._used: dict[BlockHash, None] = {}  # on the disk, since `take_used`; the last one used comes last
        self._saved: list[BlockHash] = []  # the last one used comes first
        self.evictions = 0
        self.losses: Counter[Loss] = Counter()

    @property
    def num_slots(self) -> int:
        return sum(shelf.num_slots for shelf in self._shelves.values())

    def watch(self, watcher: TierWatcher) -> None:
        """Tells it, from now on."""
        self._watchers.all.append(watcher)

    def kept_in(self, tier: Tier) -> Iterable[BlockHash]:
        return self._shelves[tier].kept

    def num_kept(self) -> dict[str, int]:
        return {tier.value: shelf.num_kept for tier, shelf in self._shelves.items() if shelf.num_slots}

    def knows(self, block_hash: BlockHash) -> bool:
        return any(block_hash in shelf for shelf in self._shelves.values())

    def find(self, hashes: Sequence[BlockHash]) -> int:
        for number, block_hash in enumerate(hashes):
            if self.tier_of(block_hash) is None:
                return number
        return len(hashes)

    def tier_of(self, block_hash: BlockHash) -> Tier | None:
        for tier, shelf in self._shelves.items():
            if shelf.keeps(block_hash):
                return tier
        return None

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in reversed(hashes):
            self._shelves[Tier.HOST].touch(block_hash)
            if self._shelves[Tier.DISK].touch(block_hash):
                self._used.pop(block_hash, None)
                self._used[block_hash] = None

    @property
    def any_used(self) -> bool:
        """`take_used` has something."""
        return bool(self._used)

    def take_used(self) -> list[tuple[int, BlockHash]]:
        """Slots of the disk, and what is in them, that were used since the last call, in the order of their use."""
        disk = self._shelves[Tier.DISK]
        found = [(slot, block_hash) for block_hash in self._used if (slot := disk.slot_of(block_hash)) is not None]
        self._used.clear()
        return found

    # ------------------------------------------------------------------ down

    def store(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[Move]:
        """What to move, in this order."""
        demotions: list[Move] = []
        moves: list[Move] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            if self.knows(block_hash):
                continue
            tier = Tier.HOST if self._shelves[Tier.HOST].is_open else Tier.DISK
            if self._make_room(tier, demotions):
                moves.append(Move(block_hash, Tier.POOL, block, tier, self._shelves[tier].put(block_hash)))
        return [*demotions, *moves]

    def _make_room(self, tier: Tier, demotions: list[Move]) -> bool:
        """Whether the tier has a free slot now. The block that had to go moves on, or is lost."""
        shelf = self._shelves[tier]
        if not shelf.is_open:
            return False
        if shelf.has_free_slot:
            return True
        victim = shelf.victim()
        if victim is None:
            self.losses[Loss.BUSY] += 1
            return False
        slot = shelf.drop(victim)
        if tier is Tier.HOST and self._make_room(Tier.DISK, demotions):
            disk_slot = self._shelves[Tier.DISK].put(victim)
            demotions.append(Move(victim, Tier.HOST, slot, Tier.DISK, disk_slot))
        else:
            self.evictions += 1
        return True

    def stored(self, move: Move, loss: Loss | None) -> None:
        shelf = self._shelves[move.target]
        if loss is None and shelf.is_open:
            shelf.written(move.block_hash)
        else:
            shelf.drop(move.block_hash)
        if loss is not None:
            self.losses[loss] += 1

    def save(self, most: int) -> list[Move]:
        """Moves blocks from the host to the disk, as many as that has slots in all. `stored` ends each."""
        host, disk = self._shelves[Tier.HOST], self._shelves[Tier.DISK]
        moves: list[Move] = []
        while len(moves) < most and len(self._saved) < disk.num_slots and disk.is_open:
            block_hash = host.newest()
            if block_hash is None or not self._make_room(Tier.DISK, []):
                break
            slot = host.drop(block_hash)
            moves.append(Move(block_hash, Tier.HOST, slot, Tier.DISK, disk.put(block_hash)))
            self._saved.append(block_hash)
        return moves

    def saved(self) -> None:
        """No more is saved: what was is in the order of its use again, behind all that was on the disk before."""
        self.touch(self._saved)

    # ------------------------------------------------------------------ up

    def restore(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[Move]:
        """For blocks that `find` has just found. Each move ends with `restored`."""
        moves: list[Move] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            tier = self.tier_of(block_hash)
            assert tier is not None, "find comes first"
            moves.append(Move(block_hash, tier, self._shelves[tier].pin(block_hash), Tier.POOL, block))
        self.touch(hashes)
        return moves

    def restored(self, move: Move, loss: Loss | None) -> None:
        shelf = self._shelves[move.source]
        if loss is not None:
            self.losses[loss] += 1
            shelf.spoil(move.block_hash)
        shelf.unpin(move.block_hash)

    def close_disk(self) -> None:
        """The disk cannot be relied on: what is there is forgotten, and nothing comes to it any more."""
        self._shelves[Tier.DISK].close()

    def check(self) -> None:
        """Proves the books; for tests."""
        for shelf in self._shelves.values():
            shelf.check()

"""The index of tiers: which block is in which slot of which tier, and what moves when one more comes. No I/O.

    store      pool ──> host                                 where there is a host tier
                        host ──> disk                        first, for the block that had the slot
               pool ──> disk                                 where there is none
    restore    host | disk ──> pool                          the block stays where it is, now the last to be evicted
    save       host ──> disk                                 when the engine ends; the block used last comes first

A block is in one tier. Moves are carried out in the order in which they were asked for, except that restores may
overtake: their slots are pinned.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import Tier, TierWatcher

from .slot_lru import SlotLru


class Loss(enum.StrEnum):
    """Why a move was not carried out."""

    BUSY = "busy"  # every slot is being read or written
    CORRUPT = "corrupt"  # the slot's bytes do not match their digest
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
    """Passes events on to every watcher."""

    def __init__(self) -> None:
        self.all: list[TierWatcher] = []

    def kept(self, block_hash: BlockHash, tier: Tier) -> None:
        for watcher in self.all:
            watcher.kept(block_hash, tier)

    def lost(self, block_hash: BlockHash, tier: Tier) -> None:
        for watcher in self.all:
            watcher.lost(block_hash, tier)


class TierIndex:
    """The slots of all tiers. Moves begin in `store`, `restore` and `save`, and end in `stored` and `restored`."""

    def __init__(self, num_host_slots: int, num_disk_slots: int, on_disk: Iterable[tuple[BlockHash, int]] = ()) -> None:
        """`on_disk` are blocks and slots of an earlier process, the least recently used first."""
        self._watchers = _Watchers()
        self._tiers = {
            Tier.HOST: SlotLru(Tier.HOST, num_host_slots, self._watchers),
            Tier.DISK: SlotLru(Tier.DISK, num_disk_slots, self._watchers, on_disk),
        }
        self._used: dict[BlockHash, None] = {}  # on the disk, since `take_used`; the last one used comes last
        self._saved: list[BlockHash] = []  # the last one used comes first
        self.evictions = 0
        self.losses: Counter[Loss] = Counter()

    @property
    def num_slots(self) -> int:
        return sum(slots.num_slots for slots in self._tiers.values())

    def watch(self, watcher: TierWatcher) -> None:
        """Call `watcher` with every change from now on."""
        self._watchers.all.append(watcher)

    def kept_in(self, tier: Tier) -> Iterable[BlockHash]:
        return self._tiers[tier].kept

    def num_kept(self) -> dict[str, int]:
        return {tier.value: slots.num_kept for tier, slots in self._tiers.items() if slots.num_slots}

    def knows(self, block_hash: BlockHash) -> bool:
        return any(block_hash in slots for slots in self._tiers.values())

    def find(self, hashes: Sequence[BlockHash]) -> int:
        for number, block_hash in enumerate(hashes):
            if self.tier_of(block_hash) is None:
                return number
        return len(hashes)

    def tier_of(self, block_hash: BlockHash) -> Tier | None:
        for tier, slots in self._tiers.items():
            if slots.keeps(block_hash):
                return tier
        return None

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in reversed(hashes):
            self._tiers[Tier.HOST].touch(block_hash)
            if self._tiers[Tier.DISK].touch(block_hash):
                self._used.pop(block_hash, None)
                self._used[block_hash] = None

    @property
    def any_used(self) -> bool:
        """True if `take_used` has something to return."""
        return bool(self._used)

    def take_used(self) -> list[tuple[int, BlockHash]]:
        """Return the slots of the disk that were used since the last call, with their blocks, in the order of use."""
        disk = self._tiers[Tier.DISK]
        found = [(slot, block_hash) for block_hash in self._used if (slot := disk.slot_of(block_hash)) is not None]
        self._used.clear()
        return found

    # ------------------------------------------------------------------ down

    def store(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[Move]:
        """Assign slots to blocks that no tier has. Returns what to move, in this order."""
        demotions: list[Move] = []
        moves: list[Move] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            if self.knows(block_hash):
                continue
            tier = Tier.HOST if self._tiers[Tier.HOST].is_open else Tier.DISK
            if self._make_room(tier, demotions):
                moves.append(Move(block_hash, Tier.POOL, block, tier, self._tiers[tier].put(block_hash)))
        return [*demotions, *moves]

    def _make_room(self, tier: Tier, demotions: list[Move]) -> bool:
        """Free a slot if need be; its block moves on to the disk or is lost. Returns whether the tier has one now."""
        slots = self._tiers[tier]
        if not slots.is_open:
            return False
        if slots.has_free_slot:
            return True
        victim = slots.victim()
        if victim is None:
            self.losses[Loss.BUSY] += 1
            return False
        slot = slots.drop(victim)
        if tier is Tier.HOST and self._make_room(Tier.DISK, demotions):
            disk_slot = self._tiers[Tier.DISK].put(victim)
            demotions.append(Move(victim, Tier.HOST, slot, Tier.DISK, disk_slot))
        else:
            self.evictions += 1
        return True

    def stored(self, move: Move, loss: Loss | None) -> None:
        """End a move down. `loss` is the reason why it was not carried out."""
        slots = self._tiers[move.target]
        if loss is None and slots.is_open:
            slots.written(move.block_hash)
        else:
            slots.drop(move.block_hash)
        if loss is not None:
            self.losses[loss] += 1

    def save(self, most: int) -> list[Move]:
        """Begin `most` moves from the host to the disk, in all as many as the disk has slots. `stored` ends each."""
        host, disk = self._tiers[Tier.HOST], self._tiers[Tier.DISK]
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
        """End saving: put what was saved in the order of its use again, behind all that was on the disk before."""
        self.touch(self._saved)

    # ------------------------------------------------------------------ up

    def restore(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[Move]:
        """Begin to restore blocks that `find` has just found. Each move ends with `restored`."""
        moves: list[Move] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            tier = self.tier_of(block_hash)
            assert tier is not None, "find comes first"
            moves.append(Move(block_hash, tier, self._tiers[tier].pin(block_hash), Tier.POOL, block))
        self.touch(hashes)
        return moves

    def restored(self, move: Move, loss: Loss | None) -> None:
        """End a move up. `loss` is the reason why it was not carried out."""
        slots = self._tiers[move.source]
        if loss is not None:
            self.losses[loss] += 1
            slots.mark_corrupt(move.block_hash)
        slots.unpin(move.block_hash)

    def close_disk(self) -> None:
        """Forget all that is on the disk, and put nothing there any more: it cannot be relied on."""
        self._tiers[Tier.DISK].close()

    def check(self) -> None:
        """Assert that the index is consistent; for tests."""
        for slots in self._tiers.values():
            slots.check()


class IndexedTiers:
    """The questions of a `KVTiers` that its index answers. Subclasses add the copies."""

    _index: TierIndex

    @property
    def num_slots(self) -> int:
        """Number of blocks that fit into all tiers."""
        return self._index.num_slots

    def find(self, hashes: Sequence[BlockHash]) -> int:
        return self._index.find(hashes)

    def tier_of(self, block_hash: BlockHash) -> Tier | None:
        return self._index.tier_of(block_hash)

    def kept_in(self, tier: Tier) -> Iterable[BlockHash]:
        return self._index.kept_in(tier)

    def watch(self, watcher: TierWatcher) -> None:
        self._index.watch(watcher)

    def knows(self, block_hash: BlockHash) -> bool:
        return self._index.knows(block_hash)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        self._index.touch(hashes)

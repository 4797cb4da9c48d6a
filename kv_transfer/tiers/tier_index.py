"""The index of one cache group's tiers: which block is in which slot of which tier, and what moves for a new block.

It does no I/O. Slots are numbered through all groups, so this group's begin at its first slot.

    store      pool ──> host                                 if there is a host tier
                        host ──> disk                        before that, for the block that had the slot
               pool ──> disk                                 if there is no host tier
    restore    host | disk ──> pool                          the block stays in its tier, now the last to be evicted
    save       host ──> disk                                 at shutdown, the most recently used block first

A block is in one tier only. Moves are carried out in the order of the calls, except that restores may overtake others,
since their slots are pinned.
"""

from __future__ import annotations

import bisect
import enum
import itertools
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
    """Passes events on to all watchers."""

    def __init__(self) -> None:
        self.all: list[TierWatcher] = []

    def kept(self, block_hash: BlockHash, tier: Tier) -> None:
        for watcher in self.all:
            watcher.kept(block_hash, tier)

    def lost(self, block_hash: BlockHash, tier: Tier) -> None:
        for watcher in self.all:
            watcher.lost(block_hash, tier)


class TierIndex:
    """The slots of all tiers. Moves begin with `store`, `restore` or `save`, and end with `stored` or `restored`."""

    def __init__(
        self,
        num_host_slots: int,
        num_disk_slots: int,
        on_disk: Iterable[tuple[BlockHash, int]] = (),
        *,
        first_host_slot: int = 0,
        first_disk_slot: int = 0,
    ) -> None:
        """`on_disk` are the blocks and slots of an earlier process, the least recently used first."""
        self._watchers = _Watchers()
        self._tiers = {
            Tier.HOST: SlotLru(Tier.HOST, num_host_slots, self._watchers, first_slot=first_host_slot),
            Tier.DISK: SlotLru(Tier.DISK, num_disk_slots, self._watchers, on_disk, first_slot=first_disk_slot),
        }
        self._used: dict[BlockHash, None] = {}  # on the disk, since the last `take_used`, in order of use
        self._saved: list[BlockHash] = []  # the most recently used block first
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
        """Return slot and block of each use of the disk since the last call, in order of use."""
        disk = self._tiers[Tier.DISK]
        found = [(slot, block_hash) for block_hash in self._used if (slot := disk.slot_of(block_hash)) is not None]
        self._used.clear()
        return found

    # ------------------------------------------------------------------ down

    def store(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[Move]:
        """Assign slots to blocks that no tier has. Returns the moves to carry out, in order."""
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
        """Make sure that a slot is free. An evicted block moves to the disk or is lost. Returns False if impossible."""
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
        """End a move of `store` or `save`. `loss` is why it was not carried out. None: it was."""
        slots = self._tiers[move.target]
        if loss is None and slots.is_open:
            slots.written(move.block_hash)
        else:
            slots.drop(move.block_hash)
        if loss is not None:
            self.losses[loss] += 1

    def save(self, most: int) -> list[Move]:
        """Begin up to `most` moves from host to disk, but no more in all than disk slots. `stored` ends each."""
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
        """End saving. Put the saved blocks back into their order of use, after all older blocks on the disk."""
        self.touch(self._saved)

    # ------------------------------------------------------------------ up

    def restore(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[Move]:
        """Begin to restore blocks that `find` has just found. `restored` ends each move."""
        moves: list[Move] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            tier = self.tier_of(block_hash)
            assert tier is not None, "find comes first"
            moves.append(Move(block_hash, tier, self._tiers[tier].pin(block_hash), Tier.POOL, block))
        self.touch(hashes)
        return moves

    def restored(self, move: Move, loss: Loss | None) -> None:
        """End a move of `restore`. `loss` is why it was not carried out. None: it was."""
        slots = self._tiers[move.source]
        if loss is not None:
            self.losses[loss] += 1
            slots.mark_corrupt(move.block_hash)
        slots.unpin(move.block_hash)

    def close_disk(self) -> None:
        """Stop using the disk, which has failed, and forget all blocks on it."""
        self._tiers[Tier.DISK].close()

    def check(self) -> None:
        """Assert that the index is consistent; for tests."""
        for slots in self._tiers.values():
            slots.check()


class IndexedTiers:
    """The lookups of a `KVTiers`, answered by one index for each cache group. Subclasses add the copies.

    Blocks and slots are numbered through all groups, so a number tells its group.
    """

    block_sizes: Sequence[float]
    _indexes: Sequence[TierIndex]
    _first_blocks: Sequence[int]  # first block of each group's arena

    @property
    def num_slots(self) -> int:
        """Number of blocks, of all cache groups, that fit into all tiers together."""
        return sum(index.num_slots for index in self._indexes)

    def find(self, hashes: Sequence[BlockHash], group: int = 0) -> int:
        return self._indexes[group].find(hashes)

    def tier_of(self, block_hash: BlockHash, group: int = 0) -> Tier | None:
        return self._indexes[group].tier_of(block_hash)

    def kept_in(self, tier: Tier, group: int = 0) -> Iterable[BlockHash]:
        return self._indexes[group].kept_in(tier)

    def watch(self, watcher: TierWatcher, group: int = 0) -> None:
        self._indexes[group].watch(watcher)

    def knows(self, block_hash: BlockHash, group: int = 0) -> bool:
        return self._indexes[group].knows(block_hash)

    def touch(self, hashes: Sequence[BlockHash], group: int = 0) -> None:
        self._indexes[group].touch(hashes)

    def _begin_store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> list[Move]:
        """Begin to store blocks of one group. Returns the moves."""
        return self._index_of(block_ids[0]).store(hashes, block_ids)

    def _begin_restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> list[Move]:
        """Begin to restore blocks, group by group. Returns one move for each block."""
        moves: list[Move] = []
        pairs = zip(hashes, block_ids, strict=True)
        for index, some in itertools.groupby(pairs, key=lambda pair: self._index_of(pair[1])):
            of_group = list(some)
            moves += index.restore([block_hash for block_hash, _ in of_group], [block for _, block in of_group])
        return moves

    def _index_of(self, block: int) -> TierIndex:
        """Return the index of the group to which a block of the pool belongs."""
        return self._indexes[group_of(block, self._first_blocks)]


def group_of(number: int, firsts: Sequence[int]) -> int:
    """Return the group of a block or slot, given the first number of each group."""
    return bisect.bisect_right(firsts, number) - 1 if len(firsts) > 1 else 0

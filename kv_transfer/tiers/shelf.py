"""The slots of one tier: which block is in which, and which of them goes first.

    absent ──put──> WRITING ──written──> KEPT ──evicted──> absent
                       └─not written─> absent  └─spoiled─> SPOILED ──read by nobody──> absent

What is being written or read (pinned) cannot be evicted: its slot is in use.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import Tier, TierWatcher


class Presence(enum.Enum):
    WRITING = "writing"
    KEPT = "kept"
    SPOILED = "spoiled"  # not what it should be; somebody still reads it


TRANSITIONS: dict[Presence, frozenset[Presence]] = {
    Presence.WRITING: frozenset({Presence.KEPT}),
    Presence.KEPT: frozenset({Presence.SPOILED}),
    Presence.SPOILED: frozenset(),
}


@dataclasses.dataclass(slots=True)
class _Entry:
    slot: int
    presence: Presence
    pins: int = 0  # how many read it


class Shelf:
    def __init__(
        self, tier: Tier, num_slots: int, watcher: TierWatcher, kept: Iterable[tuple[BlockHash, int]] = ()
    ) -> None:
        """`kept`: what is there from before, least recently used first; no block and no slot twice."""
        self.num_slots = num_slots
        self._tier = tier
        self._watcher = watcher
        self._entries = OrderedDict((block_hash, _Entry(slot, Presence.KEPT)) for block_hash, slot in kept)
        self.num_kept = len(self._entries)
        taken = {entry.slot for entry in self._entries.values()}
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in taken]
        self._open = num_slots > 0

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    @property
    def is_open(self) -> bool:
        """Blocks may be put here."""
        return self._open

    @property
    def kept(self) -> list[BlockHash]:
        """All that can be read now."""
        kept = Presence.KEPT
        return [block_hash for block_hash, entry in self._entries.items() if entry.presence is kept]

    def keeps(self, block_hash: BlockHash) -> bool:
        """It can be read now."""
        entry = self._entries.get(block_hash)
        return entry is not None and entry.presence is Presence.KEPT

    def touch(self, block_hash: BlockHash) -> bool:
        """It goes last now. Whether it is here."""
        if block_hash not in self._entries:
            return False
        self._entries.move_to_end(block_hash)
        return True

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    def victim(self) -> BlockHash | None:
        """Who goes first; None where all are in use."""
        return next(self._idle(self._entries.items()), None)

    def newest(self) -> BlockHash | None:
        """Who would go last; None where all are in use."""
        return next(self._idle(reversed(self._entries.items())), None)

    def slot_of(self, block_hash: BlockHash) -> int | None:
        """Where it can be read now, for as long as nothing else is put here; None: nowhere."""
        return self._entries[block_hash].slot if self.keeps(block_hash) else None

    def put(self, block_hash: BlockHash) -> int:
        """Takes a free slot for a block that will be written to it."""
        slot = self._free.pop()
        self._entries[block_hash] = _Entry(slot, Presence.WRITING)
        return slot

    def written(self, block_hash: BlockHash) -> None:
        self._become(self._entries[block_hash], Presence.KEPT)
        self.num_kept += 1
        self._watcher.kept(block_hash, self._tier)

    def drop(self, block_hash: BlockHash) -> int:
        """Frees the slot of a block that nobody reads. Returns it."""
        entry = self._entries.pop(block_hash)
        assert not entry.pins, "a block was dropped that is being read"
        self._free.append(entry.slot)
        if entry.presence is Presence.KEPT:
            self.num_kept -= 1
            self._watcher.lost(block_hash, self._tier)
        return entry.slot

    def pin(self, block_hash: BlockHash) -> int:
        """Its slot, which stays what it is until `unpin`."""
        entry = self._entries[block_hash]
        assert entry.presence is Presence.KEPT, "only what is kept can be read"
        entry.pins += 1
        return entry.slot

    def unpin(self, block_hash: BlockHash) -> None:
        entry = self._entries[block_hash]
        entry.pins -= 1
        if entry.presence is Presence.SPOILED and not entry.pins:
            self.drop(block_hash)

    def spoil(self, block_hash: BlockHash) -> None:
        """It is not what it should be: nobody finds it any more. Spoiling twice is a no-op."""
        entry = self._entries.get(block_hash)
        if entry is None or entry.presence is not Presence.KEPT:
            return
        if not entry.pins:
            self.drop(block_hash)
            return
        self._become(entry, Presence.SPOILED)
        self.num_kept -= 1
        self._watcher.lost(block_hash, self._tier)

    def close(self) -> int:
        """Nothing can be read or put here any more. Returns how many blocks that costs."""
        lost, self._open = self.num_kept, False
        for block_hash in list(self._entries):
            self.spoil(block_hash)
        return lost

    def check(self) -> None:
        """Every slot is free or holds one block. Walks everything; for tests."""
        used = [entry.slot for entry in self._entries.values()]
        assert sorted([*used, *self._free]) == list(range(self.num_slots)), "a slot is lost or in use twice"
        kept = sum(entry.presence is Presence.KEPT for entry in self._entries.values())
        assert kept == self.num_kept, "the count of kept blocks is wrong"

    @staticmethod
    def _idle(entries: Iterable[tuple[BlockHash, _Entry]]) -> Iterator[BlockHash]:
        return (name for name, entry in entries if entry.presence is Presence.KEPT and not entry.pins)

    @staticmethod
    def _become(entry: _Entry, presence: Presence) -> None:
        assert presence in TRANSITIONS[entry.presence], f"{entry.presence.value} -> {presence.value}"
        entry.presence = presence

"""The slots of one tier in order of use: which block is in which slot, and which is evicted first.

    absent ──put──> WRITING ──written──> KEPT ──evicted──> absent
                       └─not written─> absent  └─corrupt─> CORRUPT ──last reader done──> absent

A block that is being written or read (pinned) cannot be evicted.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import Tier, TierWatcher


class SlotState(enum.Enum):
    WRITING = "writing"
    KEPT = "kept"
    CORRUPT = "corrupt"  # its bytes are wrong, but reads of it still run


TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.WRITING: frozenset({SlotState.KEPT}),
    SlotState.KEPT: frozenset({SlotState.CORRUPT}),
    SlotState.CORRUPT: frozenset(),
}


@dataclasses.dataclass(slots=True)
class _Entry:
    slot: int
    state: SlotState
    pins: int = 0  # running reads


class SlotLru:
    """The slots of one tier. Tells `watcher` when a block becomes readable, and when it no longer is."""

    def __init__(
        self,
        tier: Tier,
        num_slots: int,
        watcher: TierWatcher,
        kept: Iterable[tuple[BlockHash, int]] = (),
        *,
        first_slot: int = 0,
    ) -> None:
        """`kept` are the blocks and slots of an earlier process, each once, the least recently used first."""
        self.num_slots = num_slots
        self._tier = tier
        self._watcher = watcher
        self._entries = OrderedDict((block_hash, _Entry(slot, SlotState.KEPT)) for block_hash, slot in kept)
        self.num_kept = len(self._entries)
        taken = {entry.slot for entry in self._entries.values()}
        self._slots = range(first_slot, first_slot + num_slots)
        self._free = [slot for slot in reversed(self._slots) if slot not in taken]
        self._open = num_slots > 0

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    @property
    def is_open(self) -> bool:
        """True while blocks may be put into this tier."""
        return self._open

    @property
    def kept(self) -> list[BlockHash]:
        """The blocks that can be read now."""
        kept = SlotState.KEPT
        return [block_hash for block_hash, entry in self._entries.items() if entry.state is kept]

    def keeps(self, block_hash: BlockHash) -> bool:
        """Return whether a block can be read now."""
        entry = self._entries.get(block_hash)
        return entry is not None and entry.state is SlotState.KEPT

    def touch(self, block_hash: BlockHash) -> bool:
        """Make a block the last to be evicted. Returns whether it is in this tier."""
        if block_hash not in self._entries:
            return False
        self._entries.move_to_end(block_hash)
        return True

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    def victim(self) -> BlockHash | None:
        """Return the block to evict first. None: all are in use."""
        return next(self._idle(self._entries.items()), None)

    def newest(self) -> BlockHash | None:
        """Return the block to evict last. None: all are in use."""
        return next(self._idle(reversed(self._entries.items())), None)

    def slot_of(self, block_hash: BlockHash) -> int | None:
        """Return the slot of a block, valid until the next `put`. None: the block cannot be read now."""
        return self._entries[block_hash].slot if self.keeps(block_hash) else None

    def put(self, block_hash: BlockHash) -> int:
        """Take a free slot for a block that will be written to it."""
        slot = self._free.pop()
        self._entries[block_hash] = _Entry(slot, SlotState.WRITING)
        return slot

    def written(self, block_hash: BlockHash) -> None:
        """Make a block readable, whose slot has been written."""
        self._set_state(self._entries[block_hash], SlotState.KEPT)
        self.num_kept += 1
        self._watcher.kept(block_hash, self._tier)

    def drop(self, block_hash: BlockHash) -> int:
        """Free the slot of a block that is not being read. Returns the slot."""
        entry = self._entries.pop(block_hash)
        assert not entry.pins, "a block was dropped that is being read"
        self._free.append(entry.slot)
        if entry.state is SlotState.KEPT:
            self.num_kept -= 1
            self._watcher.lost(block_hash, self._tier)
        return entry.slot

    def pin(self, block_hash: BlockHash) -> int:
        """Begin a read of a block and return its slot, which does not change until `unpin`."""
        entry = self._entries[block_hash]
        assert entry.state is SlotState.KEPT, "only what is kept can be read"
        entry.pins += 1
        return entry.slot

    def unpin(self, block_hash: BlockHash) -> None:
        """End a read of a block."""
        entry = self._entries[block_hash]
        entry.pins -= 1
        if entry.state is SlotState.CORRUPT and not entry.pins:
            self.drop(block_hash)

    def mark_corrupt(self, block_hash: BlockHash) -> None:
        """Forget a block whose bytes are wrong. A second call does nothing."""
        entry = self._entries.get(block_hash)
        if entry is None or entry.state is not SlotState.KEPT:
            return
        if not entry.pins:
            self.drop(block_hash)
            return
        self._set_state(entry, SlotState.CORRUPT)
        self.num_kept -= 1
        self._watcher.lost(block_hash, self._tier)

    def close(self) -> int:
        """Forget all blocks and accept no more. Returns how many were lost."""
        lost, self._open = self.num_kept, False
        for block_hash in list(self._entries):
            self.mark_corrupt(block_hash)
        return lost

    def check(self) -> None:
        """Assert that every slot is free or holds one block. Slow; for tests."""
        used = [entry.slot for entry in self._entries.values()]
        assert sorted([*used, *self._free]) == list(self._slots), "a slot is lost or in use twice"
        kept = sum(entry.state is SlotState.KEPT for entry in self._entries.values())
        assert kept == self.num_kept, "the count of kept blocks is wrong"

    @staticmethod
    def _idle(entries: Iterable[tuple[BlockHash, _Entry]]) -> Iterator[BlockHash]:
        return (name for name, entry in entries if entry.state is SlotState.KEPT and not entry.pins)

    @staticmethod
    def _set_state(entry: _Entry, state: SlotState) -> None:
        assert state in TRANSITIONS[entry.state], f"{entry.state.value} -> {state.value}"
        entry.state = state

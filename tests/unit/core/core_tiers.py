"""A `KVTiers` whose copies move when the test says so, in any order, and that may lose anything at any time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import CopyId, Restored, Stored, Tier, TierEvent, TierRead, TierStats, TierWatcher

from .core_fakes import GARBAGE, KVMemory


@dataclass
class Copy:
    hashes: list[BlockHash]
    blocks: list[int]
    content: list[list[int]]  # of a store: as it was when it was asked for


class FakeTiers:
    def __init__(self, memory: KVMemory, min_tokens: int = 1) -> None:
        self.min_tokens = min_tokens
        self.copy_s = {Tier.HOST: 1.0, Tier.DISK: 10.0}  # of a block, as the copies say: only their proportion counts
        self._memory = memory
        self._next_id = 0
        self.events: list[TierEvent] = []
        self.kept: dict[BlockHash, list[int]] = {}
        self.on_disk: set[BlockHash] = set()  # of what is kept; the rest is in the host's memory
        self.watchers: list[TierWatcher] = []
        self.touched: list[BlockHash] = []
        self.stores: dict[CopyId, Copy] = {}
        self.restores: dict[CopyId, Copy] = {}

    # ---- KVTiers

    def find(self, hashes: Sequence[BlockHash]) -> int:
        return next((number for number, name in enumerate(hashes) if name not in self.kept), len(hashes))

    def tier_of(self, block_hash: BlockHash) -> Tier | None:
        if block_hash not in self.kept:
            return None
        return Tier.DISK if block_hash in self.on_disk else Tier.HOST

    def kept_in(self, tier: Tier) -> Iterable[BlockHash]:
        return [block_hash for block_hash in self.kept if self.tier_of(block_hash) is tier]

    def watch(self, watcher: TierWatcher) -> None:
        self.watchers.append(watcher)

    def knows(self, block_hash: BlockHash) -> bool:
        return block_hash in self.kept or any(block_hash in copy.hashes for copy in self.stores.values())

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        self.touched += hashes

    def store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        content = [list(self._memory.blocks[block]) for block in block_ids]
        assert all(GARBAGE not in values for values in content), "a block goes down that was not written"
        return self._begin(self.stores, Copy(list(hashes), list(block_ids), content))

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        assert self.find(hashes) == len(hashes) == len(block_ids) > 0
        return self._begin(self.restores, Copy(list(hashes), list(block_ids), [self.kept[name] for name in hashes]))

    def poll(self) -> list[TierEvent]:
        events, self.events = self.events, []
        return events

    def stats(self) -> TierStats:
        return TierStats(blocks={"host": len(self.kept)})

    # ---- what the test makes happen

    def keep(self, blocks: dict[BlockHash, list[int]]) -> None:
        for block_hash, content in blocks.items():
            if block_hash not in self.kept:
                self.kept[block_hash] = content
                self._tell(block_hash, is_kept=True)

    def demote(self, block_hash: BlockHash) -> None:
        """From the host's memory to the disk."""
        self._tell(block_hash, is_kept=False)
        self.on_disk.add(block_hash)
        self._tell(block_hash, is_kept=True)

    def lose(self, block_hash: BlockHash) -> None:
        self._tell(block_hash, is_kept=False)
        del self.kept[block_hash]
        self.on_disk.discard(block_hash)

    def finish_store(self, copy_id: CopyId, *, kept: bool = True) -> None:
        self.check_lent()
        copy = self.stores.pop(copy_id)
        if kept:
            self.keep(dict(zip(copy.hashes, copy.content, strict=True)))
        self.events.append(Stored(copy_id))

    def finish_restore(self, copy_id: CopyId, num_good: int | None = None) -> None:
        """What is not good is overwritten all the same."""
        copy = self.restores.pop(copy_id)
        good = len(copy.blocks) if num_good is None else min(num_good, len(copy.blocks))
        for number, (block, content) in enumerate(zip(copy.blocks, copy.content, strict=True)):
            self._memory.blocks[block] = list(content) if number < good else [GARBAGE] * len(content)
        counts = Counter(tier for block_hash in copy.hashes if (tier := self.tier_of(block_hash)) is not None)
        reads = tuple(TierRead(tier, count, count * self.copy_s[tier]) for tier, count in counts.items())
        self.events.append(Restored(copy_id, good, reads))

    def scribble(self, copy_id: CopyId) -> None:
        """A restore that is on its way writes whatever it likes."""
        for block in self.restores[copy_id].blocks:
            self._memory.blocks[block] = [GARBAGE] * self._memory.block_size

    def finish_all(self) -> None:
        for copy_id in list(self.stores):
            self.finish_store(copy_id)
        for copy_id in list(self.restores):
            self.finish_restore(copy_id)

    def check_lent(self) -> None:
        """What is on its way down has not changed since it was asked for."""
        for copy in self.stores.values():
            for block, content in zip(copy.blocks, copy.content, strict=True):
                assert self._memory.blocks[block] == content, "a block changed while a copy read it"

    def _tell(self, block_hash: BlockHash, *, is_kept: bool) -> None:
        tier = self.tier_of(block_hash)
        assert tier is not None
        for watcher in self.watchers:
            (watcher.kept if is_kept else watcher.lost)(block_hash, tier)

    def _begin(self, copies: dict[CopyId, Copy], copy: Copy) -> CopyId:
        self._next_id += 1
        copies[self._next_id] = copy
        return self._next_id

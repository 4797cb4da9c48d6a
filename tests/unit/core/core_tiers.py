"""A `KVTiers` whose copies move when the test says so, in any order, and that may lose anything at any time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.engine.core.prefix import HASH_BYTES, BlockHash
from baton.engine.core.tiers import CopyId, Restored, Stored, Tier, TierEvent, TierRead, TierStats, TierWatcher

from .core_connector import Arenas
from .core_memory import GARBAGE


@dataclass
class Copy:
    names: list[bytes]
    blocks: list[int]
    content: list[list[int]]  # of a store: as it was when it was asked for


def name_in(block_hash: BlockHash, group: int) -> bytes:
    """Return what the fake calls a block: of the first group its hash."""
    return block_hash if group == 0 else b"%d:%b" % (group, block_hash)


class FakeTiers:
    def __init__(self, arenas: Arenas, min_tokens: int = 1) -> None:
        self.min_tokens = min_tokens
        self.block_sizes = [1.0] * arenas.num_groups
        self.copy_s = {Tier.HOST: 1.0, Tier.DISK: 10.0}  # of a block, as the copies say: only their proportion counts
        self._arenas = arenas
        self._next_id = 0
        self.events: list[TierEvent] = []
        self.kept: dict[bytes, list[int]] = {}  # by `name_in`
        self.on_disk: set[bytes] = set()  # of what is kept; the rest is in the host's memory
        self.watchers: defaultdict[int, list[TierWatcher]] = defaultdict(list)  # by group
        self.touched: list[bytes] = []
        self.stores: dict[CopyId, Copy] = {}
        self.restores: dict[CopyId, Copy] = {}

    # ---- KVTiers

    def find(self, hashes: Sequence[BlockHash], group: int = 0) -> int:
        names = [name_in(block_hash, group) for block_hash in hashes]
        return next((number for number, name in enumerate(names) if name not in self.kept), len(hashes))

    def tier_of(self, block_hash: BlockHash, group: int = 0) -> Tier | None:
        return self._place(name_in(block_hash, group))

    def kept_in(self, tier: Tier, group: int = 0) -> Iterable[BlockHash]:
        named = [(name, *group_and_hash(name)) for name in self.kept]
        return [block_hash for name, number, block_hash in named if number == group and self._place(name) is tier]

    def watch(self, watcher: TierWatcher, group: int = 0) -> None:
        self.watchers[group].append(watcher)

    def knows(self, block_hash: BlockHash, group: int = 0) -> bool:
        name = name_in(block_hash, group)
        return name in self.kept or any(name in copy.names for copy in self.stores.values())

    def touch(self, hashes: Sequence[BlockHash], group: int = 0) -> None:
        self.touched += [name_in(block_hash, group) for block_hash in hashes]

    def store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        content = [self._arenas.content(block) for block in block_ids]
        assert all(GARBAGE not in values for values in content), "a block goes down that was not written"
        return self._begin(self.stores, hashes, block_ids, content)

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        content = [self.kept[name] for name in self._names(hashes, block_ids)]
        assert len(hashes) == len(block_ids) > 0
        return self._begin(self.restores, hashes, block_ids, content)

    def poll(self) -> list[TierEvent]:
        events, self.events = self.events, []
        return events

    def stats(self) -> TierStats:
        return TierStats(blocks={"host": len(self.kept)})

    # ---- what the test makes happen

    def keep(self, blocks: dict[bytes, list[int]]) -> None:
        for name, content in blocks.items():
            if name not in self.kept:
                self.kept[name] = content
                self._tell(name, is_kept=True)

    def demote(self, name: bytes) -> None:
        """Move blocks from the host's memory to the disk."""
        self._tell(name, is_kept=False)
        self.on_disk.add(name)
        self._tell(name, is_kept=True)

    def lose(self, name: bytes) -> None:
        self._tell(name, is_kept=False)
        del self.kept[name]
        self.on_disk.discard(name)

    def finish_store(self, copy_id: CopyId, *, kept: bool = True) -> None:
        self.check_lent()
        copy = self.stores.pop(copy_id)
        if kept:
            self.keep(dict(zip(copy.names, copy.content, strict=True)))
        self.events.append(Stored(copy_id))

    def finish_restore(self, copy_id: CopyId, num_good: int | None = None) -> None:
        """End a restore; blocks that are not good are overwritten all the same."""
        copy = self.restores.pop(copy_id)
        good = len(copy.blocks) if num_good is None else min(num_good, len(copy.blocks))
        for number, (block, content) in enumerate(zip(copy.blocks, copy.content, strict=True)):
            if number < good:
                self._arenas.write(block, content)
            else:
                self._arenas.spoil(block)
        places = [tier for name in copy.names if (tier := self._place(name)) is not None]
        reads = tuple(
            TierRead(tier, places.count(tier), places.count(tier) * self.copy_s[tier]) for tier in set(places)
        )
        self.events.append(Restored(copy_id, good, reads))

    def scribble(self, copy_id: CopyId) -> None:
        """A restore that is on its way writes whatever it likes."""
        for block in self.restores[copy_id].blocks:
            self._arenas.spoil(block)

    def finish_all(self) -> None:
        for copy_id in list(self.stores):
            self.finish_store(copy_id)
        for copy_id in list(self.restores):
            self.finish_restore(copy_id)

    def check_lent(self) -> None:
        """Check that what is on its way down has not changed since it was asked for."""
        for copy in self.stores.values():
            for block, content in zip(copy.blocks, copy.content, strict=True):
                assert self._arenas.content(block) == content, "a block changed while a copy read it"

    def _place(self, name: bytes) -> Tier | None:
        if name not in self.kept:
            return None
        return Tier.DISK if name in self.on_disk else Tier.HOST

    def _tell(self, name: bytes, *, is_kept: bool) -> None:
        tier = self._place(name)
        assert tier is not None
        group, block_hash = group_and_hash(name)
        for watcher in self.watchers[group]:
            (watcher.kept if is_kept else watcher.lost)(block_hash, tier)

    def _names(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> list[bytes]:
        return [
            name_in(block_hash, self._arenas.group_of(block)) for block_hash, block in zip(hashes, blocks, strict=True)
        ]

    def _begin(
        self,
        copies: dict[CopyId, Copy],
        hashes: Sequence[BlockHash],
        blocks: Sequence[int],
        content: list[list[int]],
    ) -> CopyId:
        self._next_id += 1
        copies[self._next_id] = Copy(self._names(hashes, blocks), list(blocks), content)
        return self._next_id


def group_and_hash(name: bytes) -> tuple[int, BlockHash]:
    """Return the block that `name_in` calls so. Names of the first group have `prefix.HASH_BYTES` bytes."""
    if len(name) == HASH_BYTES:
        return 0, name
    return int(name[: -HASH_BYTES - 1]), name[-HASH_BYTES:]

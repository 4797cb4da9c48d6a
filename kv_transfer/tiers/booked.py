"""The questions to an engine's `KVTiers` that its books answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import Tier, TierWatcher

from .books import TierBooks


class BookedTiers:
    """A `KVTiers` without its copies: those that copy inherit from it."""

    _books: TierBooks

    @property
    def num_slots(self) -> int:
        """Blocks that all tiers have room for."""
        return self._books.num_slots

    def find(self, hashes: Sequence[BlockHash]) -> int:
        return self._books.find(hashes)

    def tier_of(self, block_hash: BlockHash) -> Tier | None:
        return self._books.tier_of(block_hash)

    def kept_in(self, tier: Tier) -> Iterable[BlockHash]:
        return self._books.kept_in(tier)

    def watch(self, watcher: TierWatcher) -> None:
        self._books.watch(watcher)

    def knows(self, block_hash: BlockHash) -> bool:
        return self._books.knows(block_hash)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        self._books.touch(hashes)

"""A gateway's mirror of the blocks that one engine has cached, in its pool and its tiers."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from baton.engine.core.block_log import BlocksCached, BlockUpdate, unpack_names

BlockName = int  # the first bytes of a block's hash, which covers all tokens up to the block's end


class FoundPrefix(NamedTuple):
    """Counts of the blocks at the start of a prompt that an engine has cached: first in the pool, then in tiers."""

    pool: int = 0
    host: int = 0
    disk: int = 0

    @property
    def in_tiers(self) -> int:
        return self.host + self.disk


class CachedBlocks:
    """The mirror. It is exact as of the engine's last message about blocks; a busy engine sends four a second.

    A block that is cached in several places counts in the fastest one. The mirror holds at most as many blocks as the
    engine has blocks and tier slots, at about 70 bytes each in this process.
    """

    def __init__(self, num_blocks: int, num_tier_blocks: int = 0) -> None:
        """Create an empty mirror of a pool of `num_blocks` and tiers of `num_tier_blocks`."""
        self._num_blocks, self._num_tier_blocks = num_blocks, num_tier_blocks
        self._number: int | None = None  # number of the last message applied; None: a snapshot is needed
        self._pool: set[BlockName] = set()
        self._host: set[BlockName] = set()
        self._disk: set[BlockName] = set()

    def __len__(self) -> int:
        return len(self._pool) + len(self._host) + len(self._disk)

    def __contains__(self, name: BlockName) -> bool:
        """Return whether a block is in the pool."""
        return name in self._pool

    @property
    def number(self) -> int | None:
        """The number of the last message; None while a snapshot is needed."""
        return self._number

    @property
    def places(self) -> tuple[Set[BlockName], Set[BlockName], Set[BlockName]]:
        """The blocks whose fastest place is the pool, the host tier and the disk tier."""
        return self._pool, self._host, self._disk

    def apply(self, message: BlockUpdate) -> bool:
        """Apply a message. Return False if a snapshot is needed: a message is missing, or the result is impossible.

        After a missing message the mirror stays as it is until the snapshot comes: most of it is still right.
        """
        if isinstance(message, BlocksCached):
            self._pool = set(unpack_names(message.stored)[: self._num_blocks])
            self._host = set(unpack_names(message.host)[: self._num_tier_blocks])
            self._disk = set(unpack_names(message.disk)[: self._num_tier_blocks - len(self._host)])
            self._number = message.number
        elif self._number is None:
            return True  # a snapshot was asked for, and will follow
        elif message.number != self._number + 1:
            self._number = None
            return False
        else:
            self._move(message.stored, self._pool, self._host, self._disk)
            self._move(message.host, self._host, self._pool, self._disk)
            self._move(message.disk, self._disk, self._pool, self._host)
            evicted = unpack_names(message.evicted)
            for place in (self._pool, self._host, self._disk):
                place.difference_update(evicted)
            self._number = message.number
            if not self._can_be_true():
                self._forget()
                return False
        return True

    def count_prefix(self, names: Sequence[BlockName]) -> int:
        """Count the blocks at the start of a prompt that the engine would find in its pool."""
        known = self._pool
        for index, name in enumerate(names):
            if name not in known:
                return index
        return len(names)

    def find_behind(self, names: Sequence[BlockName], count: int) -> FoundPrefix:
        """Count blocks that tiers can restore behind the first `count` of a prompt, which the pool has or will have."""
        if not self._host and not self._disk:
            return FoundPrefix(count)
        num_host = num_disk = 0
        for index in range(count, len(names)):
            if names[index] in self._host:
                num_host += 1
            elif names[index] in self._disk:
                num_disk += 1
            else:
                break
        return FoundPrefix(count, num_host, num_disk)

    @staticmethod
    def _move(packed: bytes, place: set[BlockName], *others: set[BlockName]) -> None:
        if names := unpack_names(packed):
            place.update(names)
            for other in others:
                other.difference_update(names)

    def _can_be_true(self) -> bool:
        num_below = len(self._host) + len(self._disk)
        return len(self._pool) <= self._num_blocks and num_below <= self._num_tier_blocks

    def _forget(self) -> None:
        self._pool, self._host, self._disk = set(), set(), set()
        self._number = None

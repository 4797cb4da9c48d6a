"""Groups of layers that keep the same of a sequence: an arena of blocks for each, and the rules of its kind.

    table of a request in a group     [ b0  b1  b2  b3  b4 ]        entry i holds tokens 16 i ... 16 i + 15

    FullGroup      (full, latent)     every token is read until the request is over: all entries are its own
    WindowGroup    (window)           [ --  --  b2  b3  b4 ]        entries behind the window are given back, and are 0
    StateGroup     (state)            [ --  s1 ]                    entry i: the state behind the last of tokens
                                                                    512 i ... 512 i + 511 that has been computed

A request has one table in each group. What differs is how many tokens an entry stands for, from which entry on the
request owns the blocks (`first_visible`), and which blocks a prefix hit needs (`deepest`).

An entry of a StateGroup is a slot that is read and written anew in every step, until its last token has been computed.
From then on it is a checkpoint, which has the hash of the block that ends there: the next entry's first step reads it
and writes to a slot of its own. A hit does the same with somebody else's checkpoint, so that nothing is ever copied.
Checkpoints are a cache and no necessity: where no slot is free, the next entry goes on in the slot of the one before.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from ..config import CacheGroupConfig
from ..layout import NOT_KEPT
from ..prefix import BlockHash
from ..tiers import KVTiers
from .blocks import BlockPool

NOT_CACHED = NOT_KEPT
IN_TIERS = NOT_CACHED - 1  # not in the pool, and can be restored
FIRST_CHECKPOINT_TOKENS = 8  # a step keeps no state behind fewer of a chunk's tokens (`kernels.state_batch`)


class CacheGroup(abc.ABC):
    """One group of layers: its arena, and how requests hold and share its blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size

    @abc.abstractmethod
    def find(self, hashes: Sequence[BlockHash]) -> Sequence[int]:
        """Return the cached blocks of a chain of hashes that a hit may use, one an entry, `NOT_CACHED` in between."""

    def find_in_tiers(
        self, found: Sequence[int], hashes: Sequence[BlockHash], tiers: KVTiers, number: int
    ) -> Sequence[int]:
        """Return what `find` has found, with `IN_TIERS` for what the tiers of this group, `number`, have beyond it."""
        return [
            IN_TIERS
            if block == NOT_CACHED and tiers.tier_of(hashes[self.last_block(entry)], number) is not None
            else block
            for entry, block in enumerate(found)
        ]

    @abc.abstractmethod
    def deepest(self, found: Sequence[int], num_blocks: int) -> int:
        """Return the most blocks, at most `num_blocks`, behind which a request may go on with what `find` found."""

    @abc.abstractmethod
    def first_visible(self, num_tokens: int) -> int:
        """Return the first entry of a table that tokens from index `num_tokens` on read."""

    def num_entries(self, num_blocks: int) -> int:
        """Return how many entries the tokens of `num_blocks` blocks fill."""
        return num_blocks

    def last_block(self, entry: int) -> int:
        """Return the block of a sequence with which an entry ends: it has that block's hash."""
        return entry

    def entries_at_start(self, num_blocks: int, num_hits: int) -> int:
        """Return how many entries a request for `num_blocks` blocks starts with, the first `num_hits` of them computed.

        Those behind are allocated before its first chunk.
        """
        return num_blocks

    def register(self, table: Sequence[int], first_kept: int, hashes: Sequence[BlockHash], blocks: range) -> None:
        """Add the entries that are full with these blocks of a sequence to the prefix cache.

        The table has nothing before entry `first_kept`.
        """
        for index in range(max(blocks.start, first_kept), blocks.stop):
            self.pool.register(table[index], hashes[index])

    @property
    def entry_tokens(self) -> int:
        """The tokens that an entry stands for."""
        return self._block_size


class FullGroup(CacheGroup):
    """Layers that read all tokens of a sequence."""

    def find(self, hashes: Sequence[BlockHash]) -> Sequence[int]:
        return self.pool.find_prefix(hashes)

    def find_in_tiers(
        self, found: Sequence[int], hashes: Sequence[BlockHash], tiers: KVTiers, number: int
    ) -> Sequence[int]:
        return [*found, *[IN_TIERS] * tiers.find(hashes[len(found) :], number)]

    def deepest(self, found: Sequence[int], num_blocks: int) -> int:
        return min(num_blocks, len(found))

    def first_visible(self, num_tokens: int) -> int:
        return 0


class WindowGroup(CacheGroup):
    """Layers that read the last `window` tokens only, the reading token itself included."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        super().__init__(num_blocks, block_size)
        self._window = window

    def find(self, hashes: Sequence[BlockHash]) -> Sequence[int]:
        return [self.pool.find_block(block_hash, NOT_CACHED) for block_hash in hashes]

    def deepest(self, found: Sequence[int], num_blocks: int) -> int:
        """Return the last place before which all blocks are cached that the next token sees.

        Each block is looked at once: a gap rules out every place from which it can be seen.
        """
        depth = min(num_blocks, len(found))
        block = depth - 1
        while depth and block >= self.first_visible(depth * self._block_size):
            if found[block] == NOT_CACHED:
                depth = block
            block -= 1
        return depth

    def first_visible(self, num_tokens: int) -> int:
        return max(0, num_tokens - self._window + 1) // self._block_size


class StateGroup(CacheGroup):
    """Layers with a recurrent state, which is kept every `checkpoint_tokens` tokens."""

    def __init__(self, num_slots: int, block_size: int, checkpoint_tokens: int) -> None:
        super().__init__(num_slots, block_size)
        self._entry_tokens = checkpoint_tokens
        self._span = checkpoint_tokens // block_size  # blocks of an entry

    @property
    def entry_tokens(self) -> int:
        return self._entry_tokens

    def find(self, hashes: Sequence[BlockHash]) -> Sequence[int]:
        ends = range(self._span - 1, len(hashes), self._span)
        return [self.pool.find_block(hashes[end], NOT_CACHED) for end in ends]

    def deepest(self, found: Sequence[int], num_blocks: int) -> int:
        depth = min(num_blocks // self._span, len(found))
        while depth and found[depth - 1] == NOT_CACHED:
            depth -= 1
        return depth * self._span

    def first_visible(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self._entry_tokens

    def register(self, table: Sequence[int], first_kept: int, hashes: Sequence[BlockHash], blocks: range) -> None:
        for entry in range(max(blocks.start // self._span, first_kept), blocks.stop // self._span):
            if table[entry] != NOT_CACHED:
                self.pool.register(table[entry], hashes[self.last_block(entry)])

    def num_entries(self, num_blocks: int) -> int:
        return num_blocks // self._span

    def last_block(self, entry: int) -> int:
        return (entry + 1) * self._span - 1

    def entries_at_start(self, num_blocks: int, num_hits: int) -> int:
        return num_hits // self._span + 1

    def may_extend(self, table: Sequence[int], end: int) -> bool:
        """Return whether `extend` can be called now: it could not where its only slot is read by others."""
        needs_one = len(table) * self._entry_tokens < end
        return not needs_one or self.pool.num_free > 0 or self.pool.references(table[-1]) == 1

    def extend(self, table: list[int], start: int, end: int, *, keeps: bool, wanted: int) -> Sequence[int]:
        """Return the entries to append so that tokens `start` to `end` can be computed in one step.

        `table` is the request's. Its last slot stays there as a checkpoint, or is moved on to the last entry and
        leaves NOT_CACHED. Where `keeps` allows any, checkpoints are kept at the ends of entries: at the last one and
        before entry `wanted` if a slot can be had, elsewhere in slots that hold nothing, so that a long prompt takes
        little from others.
        """
        current, last = len(table) - 1, (end - 1) // self._entry_tokens
        if last == current:
            return ()
        slots = dict[int, int]()
        if self.pool.references(table[current]) > 1:  # others read it: it stays, whatever else does
            slots[current] = self.pool.allocate(1)[0]
        ends = sorted(range(current, last), key=lambda entry: (entry != last - 1, entry + 1 != wanted))
        for entry in ends if keeps else ():
            may_evict = entry in (last - 1, wanted - 1)
            has_slot = self.pool.num_free > 0 if may_evict else self.pool.has_worthless
            if has_slot and entry not in slots and self._can_be_kept(entry, start):
                slots[entry] = self.pool.allocate(1)[0]
        if current in slots:
            final = slots[current]
        else:
            self.pool.forget(table[current])
            final, table[current] = table[current], NOT_CACHED
        return [*(slots.get(entry, NOT_CACHED) for entry in range(current + 1, last)), final]

    def _can_be_kept(self, entry: int, start: int) -> bool:
        """Return whether a step from token `start` on can keep the state at the end of an entry, or has it already."""
        missing = (entry + 1) * self._entry_tokens - start
        return missing == 0 or missing >= FIRST_CHECKPOINT_TOKENS


def make_groups(configs: Sequence[CacheGroupConfig], block_size: int) -> list[CacheGroup]:
    return [_group(config, block_size) for config in configs]


def _group(config: CacheGroupConfig, block_size: int) -> CacheGroup:
    if config.checkpoint_tokens is not None:
        return StateGroup(config.num_blocks, block_size, config.checkpoint_tokens)
    if config.window is None:
        return FullGroup(config.num_blocks, block_size)
    return WindowGroup(config.num_blocks, block_size, config.window)

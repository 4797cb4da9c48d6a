"""Cache groups: layers that keep the same part of a sequence. Each has an arena of blocks, and the rules of its kind.

    table of a request in a group     [ b0  b1  b2  b3  b4 ]        entry i holds tokens 16 i ... 16 i + 15

    FullGroup      (full, latent)     every token is read until the end: the request owns all entries
    WindowGroup    (window)           [ --  --  b2  b3  b4 ]        entries behind the window are given back, and are 0
    StateGroup     (state)            [ --  s1 ]                    entry i: the state after the last computed one of
                                                                    tokens 512 i ... 512 i + 511

A request has one table in each group. The kinds differ in how many tokens an entry stands for, from which entry on the
request owns the blocks (`first_visible`), and which blocks a prefix hit needs (`deepest`).

Every step reads and writes the slot of a StateGroup's last entry, until the entry's last token has been computed. Then
the slot is a checkpoint, with the hash of the block that ends there: the first step of the next entry reads it and
writes to a slot of its own. A prefix hit reads another request's checkpoint in the same way, so nothing is ever copied.
Checkpoints are only a cache: if no slot is free, the next entry continues in the slot of the entry before.

Slots are fewer than the entries that the other groups keep, since a state takes more memory than the blocks of an
entry. So a checkpoint becomes dispensable once its sequence has a later one: most hits continue whole sequences. It
does not if a request has continued from it, or if one has diverged from others before the next checkpoint. And a
checkpoint goes with the block that ends there, without which no hit reaches it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from ..block_log import HitRule
from ..config import CacheGroupConfig
from ..layout import NOT_KEPT
from ..prefix import BlockHash
from ..tiers import KVTiers
from .blocks import BlockPool

NOT_CACHED = NOT_KEPT
IN_TIERS = NOT_CACHED - 1  # not in the pool, but a tier can restore it
FIRST_CHECKPOINT_TOKENS = 8  # a chunk keeps no state after fewer tokens than this, except after its last (`LEAST_CUT`)


class CacheGroup(abc.ABC):
    """One group of layers: its arena, and how requests hold and share its blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size

    @abc.abstractmethod
    def find(self, hashes: Sequence[BlockHash]) -> Sequence[int]:
        """Return, for each entry, the cached block that a hit may use, or `NOT_CACHED`, given a chain of hashes."""

    def find_in_tiers(
        self, found: Sequence[int], hashes: Sequence[BlockHash], tiers: KVTiers, number: int
    ) -> Sequence[int]:
        """Return what `find` has `found`, with `IN_TIERS` for entries that only tiers have. `number` is the group's."""
        return [
            IN_TIERS
            if block == NOT_CACHED and tiers.tier_of(hashes[self.last_block(entry)], number) is not None
            else block
            for entry, block in enumerate(found)
        ]

    @abc.abstractmethod
    def deepest(self, found: Sequence[int], num_blocks: int) -> int:
        """Return the longest prefix hit that the `found` entries allow: in blocks, at most `num_blocks`."""

    @property
    @abc.abstractmethod
    def hit_rule(self) -> HitRule:
        """The rule by which `deepest` limits a hit, for routers, which find the same hits by names of cached blocks."""

    @abc.abstractmethod
    def num_present(self, found: Sequence[int], num_blocks: int, num_tokens: int) -> int:
        """Return how many leading blocks, at most `num_blocks`, a hand-off of `num_tokens` tokens need not bring.

        These are all blocks before the first one that the next token reads and that is not among the `found` entries.
        """

    @abc.abstractmethod
    def first_visible(self, num_tokens: int) -> int:
        """Return the first entry of a table that tokens from index `num_tokens` on read."""

    def num_entries(self, num_blocks: int) -> int:
        """Return how many entries the tokens of `num_blocks` blocks fill."""
        return num_blocks

    def last_block(self, entry: int) -> int:
        """Return the index in the sequence of the last block of an entry: the entry has that block's hash."""
        return entry

    def entries_at_start(self, num_blocks: int, num_hits: int) -> int:
        """Return how many entries a request for `num_blocks` blocks starts with, if the first `num_hits` are computed.

        Entries after the hits are allocated before the first chunk.
        """
        return num_blocks

    def register(self, table: Sequence[int], first_kept: int, hashes: Sequence[BlockHash], blocks: range) -> None:
        """Add entries to the prefix cache that become full with these `blocks` of a sequence.

        The table's entries before `first_kept` are empty.
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

    @property
    def hit_rule(self) -> HitRule:
        return HitRule()

    def num_present(self, found: Sequence[int], num_blocks: int, num_tokens: int) -> int:
        return min(num_blocks, len(found))

    def first_visible(self, num_tokens: int) -> int:
        return 0


class WindowGroup(CacheGroup):
    """Layers that read only the last `window` tokens, the reading token included."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        super().__init__(num_blocks, block_size)
        self._window = window

    def find(self, hashes: Sequence[BlockHash]) -> Sequence[int]:
        return [self.pool.find_block(block_hash, NOT_CACHED) for block_hash in hashes]

    def deepest(self, found: Sequence[int], num_blocks: int) -> int:
        """Return the longest prefix whose next token finds all blocks that it sees cached.

        Each block is looked at once: a missing block rules out every prefix that would have to see it.
        """
        depth = min(num_blocks, len(found))
        block = depth - 1
        while depth and block >= self.first_visible(depth * self._block_size):
            if found[block] == NOT_CACHED:
                depth = block
            block -= 1
        return depth

    @property
    def hit_rule(self) -> HitRule:
        return HitRule(window_blocks=-(-(self._window - 1) // self._block_size))

    def num_present(self, found: Sequence[int], num_blocks: int, num_tokens: int) -> int:
        read = range(self.first_visible(num_tokens), num_blocks)
        return next((block for block in read if found[block] == NOT_CACHED), num_blocks)

    def first_visible(self, num_tokens: int) -> int:
        return max(0, num_tokens - self._window + 1) // self._block_size


class StateGroup(CacheGroup):
    """Layers with a recurrent state. A checkpoint of it is kept every `checkpoint_tokens` tokens."""

    def __init__(self, num_slots: int, block_size: int, checkpoint_tokens: int) -> None:
        super().__init__(num_slots, block_size)
        self.pool.rank_blocks()
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

    @property
    def hit_rule(self) -> HitRule:
        return HitRule(checkpoint_blocks=self._span)

    def num_present(self, found: Sequence[int], num_blocks: int, num_tokens: int) -> int:
        return min(num_blocks, (num_tokens - 1) // self._block_size)  # the state after all tokens is handed over

    def first_visible(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self._entry_tokens

    def register(self, table: Sequence[int], first_kept: int, hashes: Sequence[BlockHash], blocks: range) -> None:
        for entry in range(max(blocks.start // self._span, first_kept), blocks.stop // self._span):
            if table[entry] != NOT_CACHED:
                self.pool.register(table[entry], hashes[self.last_block(entry)])
                self._supersede(entry, hashes)

    def _supersede(self, entry: int, hashes: Sequence[BlockHash]) -> None:
        """Make the last checkpoint before this entry's dispensable."""
        earlier = (self.pool.find_block(hashes[self.last_block(each)], NOT_CACHED) for each in reversed(range(entry)))
        superseded = next((slot for slot in earlier if slot != NOT_CACHED), None)
        if superseded is not None:
            self.pool.make_dispensable(superseded)

    def num_entries(self, num_blocks: int) -> int:
        return num_blocks // self._span

    def last_block(self, entry: int) -> int:
        return (entry + 1) * self._span - 1

    def entries_at_start(self, num_blocks: int, num_hits: int) -> int:
        return num_hits // self._span + 1

    def may_extend(self, table: Sequence[int], end: int) -> bool:
        """Return whether `extend` can be called now. It cannot if no slot is free and others read the last one."""
        needs_one = len(table) * self._entry_tokens < end
        return not needs_one or self.pool.num_free > 0 or self.pool.references(table[-1]) == 1

    def extend(self, table: list[int], start: int, end: int, *, keeps: bool, wanted: int) -> Sequence[int]:
        """Return the entries to append to `table` so that one step can compute tokens `start` to `end`.

        The table's last slot either stays as a checkpoint, or moves to the last entry and leaves NOT_CACHED. If `keeps`
        is set, states are also kept at the ends of entries: at the last end, and before entry `wanted`, wherever a slot
        can be had. States at other ends are dispensable, and kept only in slots that are empty or hold such a state: so
        a long prompt evicts no checkpoint that is more likely to be hit.
        """
        current, last = len(table) - 1, (end - 1) // self._entry_tokens
        if last == current:
            return ()
        slots = dict[int, int]()
        if self.pool.references(table[current]) > 1:  # others read this slot: it must stay as it is
            slots[current] = self.pool.allocate(1)[0]
        ends = sorted(range(current, last), key=lambda entry: (entry != last - 1, entry + 1 != wanted))
        for entry in ends if keeps else ():
            may_evict = entry in (last - 1, wanted - 1)
            has_slot = self.pool.num_free > 0 if may_evict else self.pool.has_dispensable
            if has_slot and entry not in slots:
                slots[entry] = self.pool.allocate(1)[0]
        if current in slots:
            final = slots[current]
        else:
            self.pool.forget(table[current])
            final, table[current] = table[current], NOT_CACHED
        if wanted - 1 in slots:
            self.pool.protect(table[current] if wanted - 1 == current else slots[wanted - 1])
        return [*(slots.get(entry, NOT_CACHED) for entry in range(current + 1, last)), final]

    def chunk_end(self, start: int, end: int, num_tokens: int) -> int:
        """Return where a chunk from token `start` ends, at most at `end`, so that every end of an entry can be kept.

        A chunk keeps no state after its first few tokens. So one that begins right before the end of an entry ends
        there, and one that is not the last of `num_tokens` ends far enough before the next end of an entry.
        """
        to_first = self._entry_tokens - start % self._entry_tokens
        if to_first < FIRST_CHECKPOINT_TOKENS:
            return min(end, start + to_first)
        to_next = -end % self._entry_tokens
        if end < num_tokens and 0 < to_next < FIRST_CHECKPOINT_TOKENS:
            earlier = end - (FIRST_CHECKPOINT_TOKENS - to_next)
            return earlier if earlier > start else end
        return end


class DropCheckpoints:
    """Drops checkpoints of states when the block that ends there is evicted, since no hit can reach them any more."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools

    def stored(self, block_hash: BlockHash) -> None:
        pass

    def evicted(self, block_hash: BlockHash) -> None:
        for pool in self._pools:
            pool.forget_free(block_hash)


def make_groups(configs: Sequence[CacheGroupConfig], block_size: int) -> list[CacheGroup]:
    return [_group(config, block_size) for config in configs]


def _group(config: CacheGroupConfig, block_size: int) -> CacheGroup:
    if config.checkpoint_tokens is not None:
        return StateGroup(config.num_blocks, block_size, config.checkpoint_tokens)
    if config.window is None:
        return FullGroup(config.num_blocks, block_size)
    return WindowGroup(config.num_blocks, block_size, config.window)

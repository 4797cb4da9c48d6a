"""The pool of KV blocks: reference counts, the prefix cache, and the order of eviction.

    refs[b] > 0     referenced: by that many owners (requests, held offers, quarantined receives, copies to a tier)
    refs[b] == 0    free, and a link of one doubly linked list in eviction order:

        head -> worthless blocks (no lookup finds their content) -> dispensable cached ones -> other cached ones -> tail

The cached ones of either kind are in the order of their release. Only checkpoints of states are ever dispensable
(`cache_groups.StateGroup`), and none that is protected, as those are that a prefix hit has taken.

A cached block is a block with a hash. It keeps the hash while it is free, so "cached" and "free" are the same memory: a
prefix hit takes it out of the middle of the list, an allocation takes the head and forgets its hash.

Only full blocks get a hash, and a block with a hash is never written until `forget` drops the hash. So no block that is
in several tables is ever written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Protocol

from ..prefix import BlockHash

NO_BLOCK = -2  # not adjacent to any block


class BlockPoolCorrupted(Exception):
    """The pool's state is inconsistent: a bug in Baton, found by a self-check."""


class BlockWatcher(Protocol):
    """Called for each block that enters or leaves the prefix cache."""

    def stored(self, block_hash: BlockHash) -> None: ...
    def evicted(self, block_hash: BlockHash) -> None: ...


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_dropped = 0  # references that were ever dropped
        self.prefix_queries = 0  # tokens, see `record_lookup`
        self.prefix_hits = 0
        self._refs = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._watchers: list[BlockWatcher] = []
        self.num_registered = 0  # blocks that were ever added to the prefix cache: the number of the next one
        self._new_blocks: dict[int, tuple[int, BlockHash]] | None = None  # number and hash of each block not taken yet
        self._dispensable: set[int] = set()
        self._protected: set[int] | None = None  # blocks that cannot become dispensable; None: no block can
        # The list's links are in the pool's own arrays. Entry `num_blocks` is both ends; the one behind it lies between
        # dispensable blocks and other cached ones.
        self._end, self._divider = num_blocks, num_blocks + 1
        self._next = [*range(1, num_blocks), self._divider, 0, self._end]
        self._previous = [self._end, *range(num_blocks - 1), self._divider, num_blocks - 1]

    def find_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the blocks of the longest cached prefix of a chain of hashes."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find_block(self, block_hash: BlockHash, default: int) -> int:
        """Return the cached block of this hash, or `default`."""
        return self._block_of.get(block_hash, default)

    def fits(self, prefix: Sequence[int], num_blocks: int) -> bool:
        """Return whether a table of `num_blocks` blocks that begins with the cached `prefix` can be allocated now."""
        return self.num_lacking(prefix, num_blocks) <= 0

    def num_lacking(self, prefix: Sequence[int], num_blocks: int) -> int:
        """Return how many more free blocks such a table needs than there are; it fits if none, or a negative number."""
        free_in_prefix = sum(self._refs[block] == 0 for block in prefix)
        return num_blocks - len(prefix) - self.num_free + free_in_prefix

    def take(self, prefix: Sequence[int], num_blocks: int) -> list[int]:
        """Reference the cached blocks `prefix`, and allocate the rest of a table of `num_blocks`; see `fits`."""
        for block in prefix:
            self.reference(block)
        if self._protected is not None:
            for block in prefix:
                self.protect(block)
        return [*prefix, *self.allocate(num_blocks - len(prefix), after=prefix[-1] if prefix else NO_BLOCK)]

    def allocate(self, count: int, after: int = NO_BLOCK) -> list[int]:
        """Allocate `count` blocks with one reference each, in long ascending runs, if possible right behind `after`.

        Blocks with adjacent ids are transferred as one. Runs extend only over worthless blocks; cached ones are taken
        in the order of eviction.
        """
        if count > self.num_free:
            raise BlockPoolCorrupted(f"{count} blocks were asked for and {self.num_free} are free: callers look first")
        taken: list[int] = []
        seed = after + 1 if self._is_worthless(after + 1) else self._head
        while len(taken) < count:
            for block in self._run_through(seed, count - len(taken)):
                self._unlink(block)
                self._forget(block)
                self._refs[block] = 1
                taken.append(block)
            seed = self._head
        return sorted(taken)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block, the last block first: so the beginnings of prefixes survive longest."""
        refs, hashes, has_ranks = self._refs, self._hashes, self._protected is not None
        self.num_dropped += len(blocks)
        for block in reversed(blocks):
            if refs[block] < 1:
                raise BlockPoolCorrupted(f"block {block} was released more often than taken")
            refs[block] -= 1
            if refs[block] == 0:
                if has_ranks:
                    self._link_by_rank(block)
                else:
                    self._link(block, before=self._next[self._end] if hashes[block] is None else self._end)

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Add a full block to the prefix cache, unless that has another block with the same content."""
        if block_hash not in self._block_of and self._hashes[block] is None:
            self._block_of[block_hash] = block
            self._hashes[block] = block_hash
            for watcher in self._watchers:
                watcher.stored(block_hash)
            if self._new_blocks is not None:
                self._new_blocks[block] = self.num_registered, block_hash
            self.num_registered += 1

    def forget(self, block: int) -> None:
        """Take a block out of the prefix cache, because its only owner is about to write it."""
        if self._refs[block] != 1:
            raise BlockPoolCorrupted(f"block {block} has {self._refs[block]} owners, and one of them would write it")
        self._forget(block)

    def forget_free(self, block_hash: BlockHash) -> None:
        """Take the block with this hash, if there is one and it is free, out of the prefix cache."""
        block = self._block_of.get(block_hash)
        if block is not None and self._refs[block] == 0:
            self._forget(block)
            self._unlink(block)
            self._link_by_rank(block)

    def rank_blocks(self) -> None:
        """Allow dispensable blocks, and protect those that prefix hits take from now on."""
        self._protected = set()

    def protect(self, block: int) -> None:
        """Rule out that a block in use becomes dispensable, as long as it has its content."""
        assert self._protected is not None, "the pool ranks blocks"
        self._dispensable.discard(block)
        self._protected.add(block)

    def make_dispensable(self, block: int) -> None:
        """Have a block, which is cached or in use, evicted before other cached ones, unless it is protected."""
        assert self._protected is not None, "the pool ranks blocks"
        if block not in self._dispensable and block not in self._protected:
            self._dispensable.add(block)
            if self._refs[block] == 0:
                self._unlink(block)
                self._link_by_rank(block)

    @property
    def has_dispensable(self) -> bool:
        """Return whether some free block is dispensable, or holds nothing that a lookup could find."""
        return self._next[self._end] != self._divider

    def track_new_blocks(self) -> None:
        """Record the blocks that enter the prefix cache from now on, for `take_new_block`."""
        if self._new_blocks is None:
            self._new_blocks = {}

    def take_new_block(self, before: int) -> tuple[int, BlockHash] | None:
        """Return the oldest block not taken yet that was registered with a number below `before`."""
        if not self._new_blocks:
            return None
        block, (number, block_hash) = next(iter(self._new_blocks.items()))
        if number >= before:
            return None
        del self._new_blocks[block]
        return block, block_hash

    def reference(self, block: int) -> None:
        """Add a reference to a block that is cached or in use: its content stays until the reference is released."""
        if self._refs[block] == 0:
            self._unlink(block)
        self._refs[block] += 1

    def watch(self, watcher: BlockWatcher) -> None:
        """Call `watcher` for every change of the prefix cache from now on."""
        self._watchers.append(watcher)

    def has(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_of

    def is_cached(self, block: int) -> bool:
        """Return whether lookups find this block."""
        return self._hashes[block] is not None

    @property
    def findable(self) -> Collection[BlockHash]:
        """A live view of the hashes in the prefix cache."""
        return self._block_of.keys()

    def record_lookup(self, num_tokens: int, num_hits: int) -> None:
        """Count the prefix lookup of one request, in tokens."""
        self.prefix_queries += num_tokens
        self.prefix_hits += num_hits

    def references(self, block: int) -> int:
        return self._refs[block]

    def check(self) -> None:
        """Check the invariants: free + referenced == total, the list holds the free blocks, hashes map one to one.

        It walks all blocks: for tests and post-mortems. Raises `BlockPoolCorrupted`.
        """
        free = self._walk()
        referenced = sum(count > 0 for count in self._refs)
        by_hash = {block: block_hash for block_hash, block in self._block_of.items()}
        ranks = [0 if self._hashes[block] is None else 2 - (block in self._dispensable) for block in free]
        rules = {
            "free + referenced == total": len(free) + referenced == self.num_blocks,
            "the count of free blocks is right": len(free) == self.num_free,
            "no block is free and referenced": all(self._refs[block] == 0 for block in free),
            "no count is negative": min(self._refs) >= 0,
            "hashes map one to one": by_hash
            == {block: block_hash for block, block_hash in enumerate(self._hashes) if block_hash is not None},
            "worthless blocks go first, then dispensable ones": all(a <= b for a, b in pairwise(ranks)),
            "only blocks with content are dispensable": all(
                self._refs[block] > 0 or self._hashes[block] is not None for block in self._dispensable
            ),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise BlockPoolCorrupted("; ".join(broken))

    def _walk(self) -> list[int]:
        free: list[int] = []
        block = self._next[self._end]
        while block != self._end:
            if self._previous[self._next[block]] != block or len(free) > self.num_blocks:
                raise BlockPoolCorrupted(f"the free list is broken at block {block}")
            if block != self._divider:
                free.append(block)
            block = self._next[block]
        return free

    @property
    def _head(self) -> int:
        """The free block to evict first; only if there is one."""
        first = self._next[self._end]
        return first if first != self._divider else self._next[first]

    def _run_through(self, seed: int, limit: int) -> range:
        first = last = seed
        while last - first + 1 < limit and self._is_worthless(last + 1):
            last += 1
        while last - first + 1 < limit and self._is_worthless(first - 1):
            first -= 1
        return range(first, last + 1)

    def _is_worthless(self, block: int) -> bool:
        return 0 <= block < self.num_blocks and self._refs[block] == 0 and self._hashes[block] is None

    def _forget(self, block: int) -> None:
        if self._protected is not None:
            self._dispensable.discard(block)
            self._protected.discard(block)
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hashes[block] = None
            for watcher in self._watchers:
                watcher.evicted(block_hash)
            if self._new_blocks is not None:
                self._new_blocks.pop(block, None)

    def _link_by_rank(self, block: int) -> None:
        """Link a free block where it belongs in the order of eviction, dispensable or not."""
        if self._hashes[block] is None:
            self._forget(block)
            self._link(block, before=self._next[self._end])
        else:
            self._link(block, before=self._divider if block in self._dispensable else self._end)

    def _link(self, block: int, before: int) -> None:
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = block
        self._previous[block], self._next[block] = previous, before
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        previous, following = self._previous[block], self._next[block]
        self._next[previous], self._previous[following] = following, previous
        self.num_free -= 1

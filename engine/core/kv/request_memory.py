"""The blocks of requests: reserved, grown, and registered in the prefix cache when they are full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..prefix import BlockHash, extend_block_hashes
from ..requests.request import Request
from .blocks import BlockPool

MOST_KNOWN = 16  # lookups that are kept: as many requests as are looked at near the head of the queue


class PrefixLookup(NamedTuple):
    """The cached prefix of one request."""

    hashes: Sequence[BlockHash]  # of all full blocks that it need not compute where they are cached
    blocks: Sequence[int]  # that hold the first of them

    @property
    def missing(self) -> Sequence[BlockHash]:
        """The hashes of full blocks behind the prefix hits."""
        return self.hashes[len(self.blocks) :]


class _CachedLookup(NamedTuple):
    """A lookup that holds until one of `decisive` is cached or evicted: the blocks found, and the first one missing."""

    prefix: PrefixLookup
    decisive: frozenset[BlockHash]


class RequestMemory:
    """Reserves, grows and registers the blocks of requests. Knows nothing of the order in which they are served.

    A `BlockWatcher` of the pool, so that a request that waits is looked up once, however many steps it waits.
    """

    def __init__(self, pool: BlockPool, block_size: int, enable_prefix_caching: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._caching = enable_prefix_caching
        self._known: dict[Request, _CachedLookup] = {}  # of requests that have no blocks yet, the oldest lookup first
        pool.watch(self)

    def lookup(self, request: Request) -> PrefixLookup:
        """Find the request's longest cached prefix.

        The head of the queue is asked about several times a step, and in each step while it does not fit. It is looked
        up again only when blocks of its prefix have come or gone, or its tokens have changed.
        """
        hashes = self.skippable_hashes(request)
        known = self._known.get(request)
        if known is not None and len(known.prefix.hashes) == len(hashes):
            return known.prefix
        prefix = PrefixLookup(hashes, self._pool.find_prefix(hashes))
        self._known[request] = _CachedLookup(prefix, frozenset(hashes[: len(prefix.blocks) + 1]))
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return prefix

    def stored(self, block_hash: BlockHash) -> None:
        self._forget_lookups(block_hash)

    def evicted(self, block_hash: BlockHash) -> None:
        self._forget_lookups(block_hash)

    def _forget_lookups(self, block_hash: BlockHash) -> None:
        if self._known:
            for request in [each for each, known in self._known.items() if block_hash in known.decisive]:
                del self._known[request]

    def num_blocks(self, request: Request) -> int:
        """Return how many blocks the request needs to start, cached ones included."""
        return self._blocks_for(request.num_to_hold)

    def fits(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Return whether it could be given its blocks now, or once those of the requests `without` are back."""
        prefix = self.lookup(request).blocks
        given_back = Counter(block for other in without for block in other.block_ids)
        num_freed = sum(self._pool.references(block) == count for block, count in given_back.items())
        num_freed -= sum(self._pool.references(block) == given_back[block] for block in prefix if block in given_back)
        return self._pool.fits(prefix, self._blocks_for(request.num_to_hold) - num_freed)

    def reserve(self, request: Request) -> bool:
        """Give a request blocks for all its tokens, leading ones from the prefix cache; False where they do not fit.

        All at once, before the first chunk: a prompt that was begun can be finished, and its blocks lie side by side.
        """
        prefix = self.lookup(request).blocks
        num_blocks = self._blocks_for(request.num_to_hold)
        if not self._pool.fits(prefix, num_blocks):
            return False
        self._known.pop(request, None)
        blocks = self._pool.take(prefix, num_blocks)
        request.take_blocks(blocks, num_blocks * self._block_size, num_computed=len(prefix) * self._block_size)
        if self._caching:
            self._set_registered(request, len(prefix))
            if not request.stages.has_started and request.may_skip_computed_prefix:
                self._pool.record_lookup(len(request.token_ids), request.num_computed)
        return True

    def grow(self, request: Request) -> list[int]:
        """Return one more block for the request, if there is one."""
        if not self._pool.num_free:
            return []
        new = self._pool.allocate(1, after=request.block_ids[-1])
        request.block_ids += new
        request.capacity += self._block_size
        return new

    def register(self, request: Request) -> Sequence[int]:
        """Register the blocks in the prefix cache that are full of known tokens. Returns those that were not before.

        A planned step may still have to write them. Readers come in a later step, or in the same one with more than a
        token: for those every layer writes the KV of all chunks before it reads any.
        """
        if not self._caching:
            return ()
        num_full = min(request.num_computed, len(request.token_ids)) // self._block_size
        self._hash_blocks(request, num_full)
        new = range(request.num_registered, num_full)
        for index in new:
            self._pool.register(request.block_ids[index], request.block_hashes[index])
        self._set_registered(request, num_full)
        return request.block_ids[new.start : new.stop]

    def is_decode_after(self, blocks: set[int], request: Request, budget: int) -> bool:
        """Return whether it would run a single token next, after a prefix of which some lies in `blocks`."""
        num_known = len(request.token_ids) - 1
        if not blocks or (budget > 1 and num_known % self._block_size):
            return False
        prefix = self.lookup(request).blocks
        may_be_one = budget == 1 or len(prefix) * self._block_size == num_known
        return may_be_one and not blocks.isdisjoint(prefix)

    def skippable_hashes(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes of the full blocks that it need not compute where they are cached.

        Never of all its tokens: the last one has to be computed for the next to be drawn.
        """
        if not self._caching or not request.may_skip_computed_prefix:
            return ()
        num_blocks = (len(request.token_ids) - 1) // self._block_size
        self._hash_blocks(request, num_blocks)
        return request.block_hashes[:num_blocks]

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        if len(request.block_hashes) < num_blocks:
            tokens = request.token_ids
            extend_block_hashes(request.block_hashes, request.root, tokens, num_blocks, self._block_size)

    def _set_registered(self, request: Request, num_blocks: int) -> None:
        request.num_registered = num_blocks
        request.next_registration = (num_blocks + 1) * self._block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

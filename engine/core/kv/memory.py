"""Which blocks a request has, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..prefix import BlockHash, extend_block_hashes
from ..requests.request import Request
from .blocks import BlockPool


class RequestMemory:
    """Reserves, grows and registers the blocks of requests. Knows nothing of who is served when."""

    def __init__(self, pool: BlockPool, block_size: int, enable_prefix_caching: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._caching = enable_prefix_caching

    def fits(self, request: Request, without: Sequence[Request] = ()) -> bool:
        """Whether it could be given its blocks now, or once those of the requests `without` are back."""
        prefix = self._cached_prefix(request)
        given_back = Counter(block for other in without for block in other.block_ids)
        num_freed = sum(self._pool.references(block) == count for block, count in given_back.items())
        num_freed -= sum(self._pool.references(block) == given_back[block] for block in prefix if block in given_back)
        return self._pool.fits(prefix, self._blocks_for(request.num_to_hold) - num_freed)

    def reserve(self, request: Request) -> bool:
        """Gives a request blocks for all its tokens, leading ones from the prefix cache; False where they do not fit.

        All at once, before the first chunk: a prompt that was begun can be finished, and its blocks lie side by side.
        """
        prefix = self._cached_prefix(request)
        num_blocks = self._blocks_for(request.num_to_hold)
        if not self._pool.fits(prefix, num_blocks):
            return False
        request.block_ids = self._pool.take(prefix, num_blocks)
        request.capacity = num_blocks * self._block_size
        request.num_computed = len(prefix) * self._block_size
        if self._caching:
            self._set_registered(request, len(prefix))
            if not request.stages.has_started and request.may_skip_computed_prefix:
                self._pool.record_lookup(len(request.token_ids), request.num_computed)
        return True

    def grow(self, request: Request) -> list[int]:
        """One more block, if there is one."""
        if not self._pool.num_free:
            return []
        new = self._pool.allocate(1, after=request.block_ids[-1])
        request.block_ids += new
        request.capacity += self._block_size
        return new

    def register(self, request: Request) -> Sequence[int]:
        """Makes those blocks findable that are full of known tokens. Returns those of them that were not before.

        They may be still to be written by a step that is planned. Readers come in a later step, or in the same with
        more than a token: for those every layer writes the KV of all chunks before it reads any.
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

    def has_one_token_behind(self, blocks: set[int], request: Request, budget: int) -> bool:
        """Whether it would run a single token next, after a prefix that is in `blocks` in part."""
        num_known = len(request.token_ids) - 1
        if not blocks or (budget > 1 and num_known % self._block_size):
            return False
        prefix = self._cached_prefix(request)
        may_be_one = budget == 1 or len(prefix) * self._block_size == num_known
        return may_be_one and not blocks.isdisjoint(prefix)

    def missing(self, request: Request) -> list[BlockHash]:
        """The names of the full blocks behind its prefix hits that it could skip if they were there."""
        findable = self.findable(request)
        return findable[len(self._pool.find_prefix(findable)) :]

    def findable(self, request: Request) -> list[BlockHash]:
        """The names of the full blocks that it need not compute where they are cached.

        Never everything: the last token has to be computed for the next to be drawn.
        """
        if not self._caching or not request.may_skip_computed_prefix:
            return []
        num_blocks = (len(request.token_ids) - 1) // self._block_size
        self._hash_blocks(request, num_blocks)
        return request.block_hashes[:num_blocks]

    def _cached_prefix(self, request: Request) -> list[int]:
        return self._pool.find_prefix(self.findable(request))

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        if len(request.block_hashes) < num_blocks:
            tokens = request.token_ids
            extend_block_hashes(request.block_hashes, request.root, tokens, num_blocks, self._block_size)

    def _set_registered(self, request: Request, num_blocks: int) -> None:
        request.num_registered = num_blocks
        request.next_registration = (num_blocks + 1) * self._block_size

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

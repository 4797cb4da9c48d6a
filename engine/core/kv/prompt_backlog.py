"""Tokens of waiting prompts that are in no cache, and so have to be computed: a figure of the engine's load."""

from __future__ import annotations

from ..prefix import BlockHash
from ..requests.request import Request
from .blocks import BlockPool
from .request_memory import RequestMemory


class PromptBacklog:
    """Counts the tokens of waiting prompts that have to be computed. A `BlockWatcher` of the pool.

        full blocks of waiting prompts      each counts once, however many requests share it, unless it is cached
        tokens behind the last full block   always count: they are never cached

    The sum is kept up to date as requests and cached blocks come and go. The cost is one lookup for each block of a
    prompt when the request comes and one when it goes, however long it waits.
    """

    def __init__(self, memory: RequestMemory, pool: BlockPool, block_size: int) -> None:
        self._memory = memory
        self._pool = pool
        self._block_size = block_size
        self._waiting: dict[Request, tuple[int, int]] = {}  # full blocks of each request, and the tokens behind them
        self._wanted: dict[BlockHash, int] = {}  # how many waiting requests share each block
        self._num_missing = 0  # wanted blocks that are not cached
        self._num_behind = 0  # tokens
        pool.watch(self)

    @property
    def num_tokens(self) -> int:
        return self._num_missing * self._block_size + self._num_behind

    def num_full_blocks(self, request: Request) -> int:
        """Return how many full blocks `add` counted for a waiting request."""
        return self._waiting.get(request, (0, 0))[0]

    def add(self, request: Request) -> None:
        """Count a request, unless it loads its KV from another engine: it computes nothing."""
        if request.awaits_transfer:
            return
        hashes, wanted = self._memory.skippable_hashes(request), self._wanted
        for block_hash in hashes:
            count = wanted.get(block_hash, 0)
            if not count and not self._pool.has(block_hash):
                self._num_missing += 1
            wanted[block_hash] = count + 1
        num_behind = request.num_tokens - len(hashes) * self._block_size
        self._num_behind += num_behind
        self._waiting[request] = len(hashes), num_behind

    def remove(self, request: Request) -> None:
        """Stop counting a request. One that is not counted is ignored."""
        num_blocks, num_behind = self._waiting.pop(request, (0, 0))
        self._num_behind -= num_behind
        wanted = self._wanted
        for block_hash in request.block_hashes[:num_blocks]:
            if wanted[block_hash] > 1:
                wanted[block_hash] -= 1
                continue
            del wanted[block_hash]
            if not self._pool.has(block_hash):
                self._num_missing -= 1

    def stored(self, block_hash: BlockHash) -> None:
        if block_hash in self._wanted:
            self._num_missing -= 1

    def evicted(self, block_hash: BlockHash) -> None:
        if block_hash in self._wanted:
            self._num_missing += 1

"""How many tokens of waiting prompts have to be computed.

    blocks of waiting prompts     each counts once, whoever waits for it, and not while it is cached
    what is behind a prompt's     counts always: no cache has it
    last findable block

Requests and blocks that come and go change the sum as they do: it costs one look at each block of a prompt when the
prompt comes, and one when it goes, however long it waits.
"""

from __future__ import annotations

from ..kv.blocks import BlockPool
from ..kv.memory import RequestMemory
from ..prefix import BlockHash
from ..requests.request import Request


class UnreadPrompts:
    """Of the requests that wait. A `BlockWatcher` of their pool."""

    def __init__(self, memory: RequestMemory, pool: BlockPool, block_size: int) -> None:
        self._memory = memory
        self._pool = pool
        self._block_size = block_size
        self._waiting: dict[Request, tuple[int, int]] = {}  # its findable blocks, and the tokens behind them
        self._wanted: dict[BlockHash, int] = {}  # by so many of them
        self._num_missing = 0  # wanted blocks that are not cached
        self._num_behind = 0  # tokens
        pool.watch(self)

    @property
    def num_tokens(self) -> int:
        return self._num_missing * self._block_size + self._num_behind

    def add(self, request: Request) -> None:
        """One whose KV another engine has computes nothing."""
        if request.awaits_transfer:
            return
        findable, wanted = self._memory.findable(request), self._wanted
        for block_hash in findable:
            count = wanted.get(block_hash, 0)
            if not count and not self._pool.has(block_hash):
                self._num_missing += 1
            wanted[block_hash] = count + 1
        num_behind = request.num_tokens - len(findable) * self._block_size
        self._num_behind += num_behind
        self._waiting[request] = len(findable), num_behind

    def remove(self, request: Request) -> None:
        """One that is not there is ignored."""
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

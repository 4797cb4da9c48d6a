"""Groups of layers that keep the same of a sequence: an arena of blocks for each, and the rules of its kind.

    table of a request in a group     [ b0  b1  b2  b3  b4 ]        entry i holds tokens 16 i ... 16 i + 15

    FullGroup      (full, latent)     every token is read until the request is over: all entries are its own
    WindowGroup    (window)           [ --  --  b2  b3  b4 ]        entries behind the window are given back, and are 0

A request has one table in each group. Tables of all groups are equally long; what differs is from which entry on the
request owns the blocks (`first_visible`), and which blocks a prefix hit needs (`deepest`).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from ..config import CacheGroupConfig
from ..prefix import BlockHash
from .blocks import BlockPool

NOT_CACHED = -1


class CacheGroup(abc.ABC):
    """One group of layers: its arena, and how requests hold and share its blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size

    @abc.abstractmethod
    def find(self, hashes: Sequence[BlockHash]) -> Sequence[int]:
        """Return the cached blocks of a chain of hashes that a hit may use, one an entry, `NOT_CACHED` in between."""

    @abc.abstractmethod
    def deepest(self, found: Sequence[int], num_blocks: int) -> int:
        """Return the most blocks, at most `num_blocks`, behind which a request may go on with what `find` found."""

    @abc.abstractmethod
    def first_visible(self, num_tokens: int) -> int:
        """Return the first entry of a table that tokens from index `num_tokens` on read."""


class FullGroup(CacheGroup):
    """Layers that read all tokens of a sequence."""

    def find(self, hashes: Sequence[BlockHash]) -> Sequence[int]:
        return self.pool.find_prefix(hashes)

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


def make_groups(configs: Sequence[CacheGroupConfig], block_size: int) -> list[CacheGroup]:
    return [
        FullGroup(config.num_blocks, block_size)
        if config.window is None
        else WindowGroup(config.num_blocks, block_size, config.window)
        for config in configs
    ]

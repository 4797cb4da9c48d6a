"""Which blocks one engine has cached, as a gateway knows it: a mirror of the engine's own pool."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.core.block_log import BlockNews, BlocksCached, unpack_names

BlockName = int  # the first bytes of a block's hash; stands for all tokens up to the block's end


class CachedBlocks:
    """Exact as of the engine's last news, which a busy engine sends four times a second.

    It holds no more than the engine has blocks: about 70 bytes a block in this process.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: of the engine's pool. Empty until the first snapshot."""
        self._num_blocks = num_blocks
        self._number: int | None = None  # None: unknown, waits for a snapshot
        self._names: set[BlockName] = set()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._names

    def apply(self, news: BlockNews) -> bool:
        """False: news are missing before these, or they cannot be true; a snapshot is needed.

        Until it comes, what was known stays the answer: most of it is still right.
        """
        if isinstance(news, BlocksCached):
            names = unpack_names(news.stored)
            self._names = set(names[: self._num_blocks])
            self._number = news.number
        elif self._number is None:
            return True  # a snapshot was asked for and is on its way behind these
        elif news.number != self._number + 1:
            self._number = None
            return False
        else:
            self._names.difference_update(unpack_names(news.evicted))
            self._names.update(unpack_names(news.stored))
            self._number = news.number
            if len(self._names) > self._num_blocks:
                self._names.clear()
                self._number = None
                return False
        return True

    def count_prefix(self, names: Sequence[BlockName]) -> int:
        """How many blocks at the start of a prompt are cached, as the engine would find them."""
        known = self._names
        for index, name in enumerate(names):
            if name not in known:
                return index
        return len(names)

"""The block tables with which a request starts, and the blocks that it lacks for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from .blocks import BlockPool
from .cache_groups import IN_TIERS


class TableStart(NamedTuple):
    """The table in one group with which a request starts."""

    first: int  # the first entry that the request owns
    hits: Sequence[int]  # cached blocks, from that entry on; IN_TIERS: a new block, to be restored
    num_entries: int

    @property
    def cached(self) -> Sequence[int]:
        return [block for block in self.hits if block != IN_TIERS] if IN_TIERS in self.hits else self.hits

    def fits(self, pool: BlockPool) -> bool:
        """Return whether the table can be allocated now."""
        return pool.fits(self.cached, self.num_entries - self.first)

    def num_lacking(self, pool: BlockPool, without: Sequence[Sequence[int]]) -> int:
        """Return how many blocks the table lacks at least, once the blocks `without` are released.

        It is the exact number if nothing is lacking.
        """
        num_lacking = pool.num_lacking(self.cached, self.num_entries - self.first)
        if num_lacking > (most := sum(map(len, without))):  # it lacks some even if nobody else has these blocks
            return num_lacking - most
        given_back = Counter(chain.from_iterable(without))
        num_freed = sum(pool.references(block) == count for block, count in given_back.items())
        num_freed -= sum(pool.references(block) == given_back[block] for block in self.hits if block in given_back)
        return num_lacking - num_freed

    def take(self, pool: BlockPool) -> list[int]:
        """Return the blocks of the table: hits, new blocks in the gaps between them, and new ones behind."""
        cached = self.cached
        blocks = pool.take(cached, self.num_entries - self.first)
        if len(cached) == len(self.hits):
            return blocks
        new = iter(blocks[len(cached) :])
        return [*(next(new) if block == IN_TIERS else block for block in self.hits), *new]


class Shortage(NamedTuple):
    """Blocks that a waiting request lacks even if all requests of lower priority released theirs.

    Each reference that is dropped, by whomever, can make up for one of them. Nothing else can, unless the request is to
    start with other tables.
    """

    priority: int
    starts: Sequence[TableStart]  # in each group
    pool: BlockPool  # where blocks are lacking
    most_dropped: int  # from this `BlockPool.num_dropped` on, the shortage may be over

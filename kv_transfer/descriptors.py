"""Turn block ids into byte ranges, between any two ways of dividing KV heads over ranks.

    holder, 2 ranks   [0 1] [2 3]        a reader's rank takes each of its heads from a rank that has it;
    reader, 4 ranks   [0][1][2][3]       heads of one rank that are neighbours there go together

    holder's blocks   7  8  9  3         where both sides keep the same heads, blocks that are neighbours on
    our blocks        2  3  4  5         both sides share one range: [7..9] -> [2..4], [3] -> [5]

A rank's part of a block is one contiguous range for all layers (`engine/core/layout.py`), and so is any run of heads
in it. Where fewer heads are read than either side keeps, there are gaps between blocks: one range a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .errors import TransportError
from .transports import RangeTable


class AssignedHeads(NamedTuple):
    """The heads that one rank of the reader reads from one rank of the holder."""

    holder_rank: int
    heads: range  # of the model


class HeadSlice(NamedTuple):
    """Some heads of a block: their place in the holder's part of the block and in ours, in bytes."""

    num_bytes: int
    remote_offset: int
    remote_block: int  # bytes from one block to the next
    local_offset: int
    local_block: int

    @property
    def whole(self) -> bool:
        """True if nothing lies between these heads of one block and of the next."""
        return self.num_bytes == self.remote_block == self.local_block


def assign_heads(rank: int, heads: range, holders: Sequence[range]) -> list[AssignedHeads]:
    """Decide from which rank of the holder rank `rank` of the reader reads each of its own `heads`.

    `holders` are the heads that each rank of the holder keeps. Readers take turns at ranks that keep the same head.
    Raises `TransportError` for a head that no rank keeps.
    """
    found: list[AssignedHeads] = []
    for head in heads:
        having = [number for number, kept in enumerate(holders) if head in kept]
        if not having:
            raise TransportError(f"KV head {head} is on none of the holder's {len(holders)} ranks")
        source = having[rank % len(having)]
        if found and found[-1].holder_rank == source:
            found[-1] = AssignedHeads(source, range(found[-1].heads.start, head + 1))
        else:
            found.append(AssignedHeads(source, range(head, head + 1)))
    return found


def slice_heads(heads: range, remote: range, local: range, head_bytes: int) -> HeadSlice:
    """Locate `heads` in blocks of which the holder's rank keeps the heads `remote` and ours the heads `local`."""
    return HeadSlice(
        num_bytes=len(heads) * head_bytes,
        remote_offset=(heads.start - remote.start) * head_bytes,
        remote_block=len(remote) * head_bytes,
        local_offset=(heads.start - local.start) * head_bytes,
        local_block=len(local) * head_bytes,
    )


def block_ranges(source_blocks: Sequence[int], local_blocks: Sequence[int], piece: HeadSlice) -> RangeTable:
    """Return as few ranges as possible, in order: neighbouring whole blocks share one.

    Raises `ValueError` for lists of different lengths.
    """
    sources, locals_ = (np.asarray(blocks, dtype=np.int64) for blocks in (source_blocks, local_blocks))
    if len(sources) != len(locals_):
        raise ValueError(f"{len(sources)} blocks of the holder, {len(locals_)} of ours")
    counts = np.ones_like(sources)
    if piece.whole and len(sources) > 1:
        goes_on = (np.diff(sources) == 1) & (np.diff(locals_) == 1)  # behind the block before it, on both sides
        first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        counts = np.diff(np.append(first, len(sources)))
        sources, locals_ = sources[first], locals_[first]
    remote = sources * piece.remote_block + piece.remote_offset
    local = locals_ * piece.local_block + piece.local_offset
    return np.column_stack((remote, local, counts * piece.num_bytes))

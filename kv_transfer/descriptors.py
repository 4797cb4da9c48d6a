"""Turn block ids into byte ranges, between any two ways of dividing KV heads over ranks.

    holder, 2 ranks   [0 1] [2 3]        a reader's rank takes each of its heads from a rank that has it;
    reader, 4 ranks   [0][1][2][3]       heads of one rank that are neighbours there go together

    holder's blocks   7  8  9  3         where both sides keep the same heads, blocks that are neighbours on
    our blocks        2  3  4  5         both sides share one range: [7..9] -> [2..4], [3] -> [5]

A rank's part of a block of KV is one contiguous range for all layers (`engine/core/layout.py`), and so is any run of
heads in it. Where fewer heads are read than either side keeps, there are gaps between blocks: one range a block. Heads
of a recurrent state lie apart in a slot, a piece for each layer and part, unless both sides keep the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.engine.core.layout import KVLayout, StateLayout
from baton.engine.core.regions import CacheRegion

from .errors import TransportError
from .transports import ByteRange, RangeTable


class AssignedHeads(NamedTuple):
    """The heads that one rank of the reader reads from one rank of the holder."""

    holder_rank: int
    heads: range  # of the model


class HeadSlice(NamedTuple):
    """Some heads of a block: their places in the holder's part of the block and in ours, in bytes."""

    remote_block: int  # bytes from one block to the next
    local_block: int
    pieces: tuple[ByteRange, ...]  # of one block; offsets from the start of the block

    @property
    def num_bytes(self) -> int:
        """Bytes of one block."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """True if nothing lies between these heads of one block and of the next."""
        return len(self.pieces) == 1 and self.pieces[0].num_bytes == self.remote_block == self.local_block


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


def slice_heads(layout: KVLayout | StateLayout, heads: range, remote: range, local: range) -> HeadSlice:
    """Locate `heads` in blocks of which the holder's rank keeps the heads `remote` and ours the heads `local`."""
    if remote == local:
        both = layout.pieces(local, heads)
        pieces = [ByteRange(piece.offset, piece.offset, piece.num_bytes) for piece in both]
    else:  # a rank that keeps just these heads has them in one piece, and the other one may not
        theirs, ours = layout.sections(remote, heads), layout.sections(local, heads)
        pieces = [ByteRange(at.offset, here.offset, at.num_bytes) for at, here in zip(theirs, ours, strict=True)]
    return HeadSlice(layout.bytes_of(remote), layout.bytes_of(local), tuple(pieces))


def block_ranges(
    source_blocks: Sequence[int],
    local_blocks: Sequence[int],
    piece: HeadSlice,
    remote_start: int = 0,
    local_start: int = 0,
) -> RangeTable:
    """Return as few ranges as possible, in order: neighbouring whole blocks share one.

    Block 0 begins at byte `remote_start` of the holder's region, and `local_start` of ours. Raises `ValueError` for
    lists of different lengths.
    """
    sources, locals_ = (np.asarray(blocks, dtype=np.int64) for blocks in (source_blocks, local_blocks))
    if len(sources) != len(locals_):
        raise ValueError(f"{len(sources)} blocks of the holder, {len(locals_)} of ours")
    counts = np.ones_like(sources)
    if piece.is_whole and len(sources) > 1:
        goes_on = (np.diff(sources) == 1) & (np.diff(locals_) == 1)  # behind the block before it, on both sides
        first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        counts = np.diff(np.append(first, len(sources)))
        sources, locals_ = sources[first], locals_[first]
    offsets = np.array(piece.pieces, dtype=np.int64)
    remote = sources[:, None] * piece.remote_block + (offsets[:, 0] + remote_start)
    local = locals_[:, None] * piece.local_block + (offsets[:, 1] + local_start)
    return np.stack((remote, local, counts[:, None] * offsets[:, 2]), axis=-1).reshape(-1, 3)


def arenas_of(firsts: Sequence[int], blocks: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of the arena of each block, given the first block of each arena."""
    return np.searchsorted(np.asarray(firsts), np.asarray(blocks, dtype=np.int64), side="right") - 1


def bytes_of(region: CacheRegion, blocks: Sequence[int]) -> NDArray[np.int64]:
    """Return the bytes that this rank keeps of each of these blocks."""
    sizes = np.array([arena.block_bytes for arena in region.arenas])
    return sizes[arenas_of(region.first_blocks, blocks)]

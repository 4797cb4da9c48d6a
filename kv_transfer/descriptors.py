"""Turn block ids into byte ranges to read, whatever the numbers of ranks over which both sides divide the KV heads.

    holder, 2 ranks   [0 1] [2 3]        a rank of the reader reads each of its heads from a rank that keeps it;
    reader, 4 ranks   [0][1][2][3]       neighbouring heads on one rank of the holder are read together

    holder's blocks   7  8  9  3         if both ranks keep the same heads, blocks that are neighbours on
    our blocks        2  3  4  5         both sides share one range: [7..9] -> [2..4], [3] -> [5]

A rank's share of a KV block is one contiguous range for all layers (`engine/core/layout.py`), and so is any run of
heads in it. If the heads that are read are not all that a side keeps, there are gaps between blocks on that side, and
each block needs a range of its own. Heads of a recurrent state are scattered over its slot, one piece for each layer
and part of the state, unless both sides keep the same heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.engine.core.layout import KVLayout, StateLayout
from baton.engine.core.regions import CacheRegion

from .errors import TransportError
from .protocol.block_runs import BlockNumbers
from .transports import ByteRange, RangeTable


class AssignedHeads(NamedTuple):
    """The heads that one rank of the reader reads from one rank of the holder."""

    holder_rank: int
    heads: range  # numbered as in the model


@dataclasses.dataclass(frozen=True)
class HeadSlice:
    """The byte offsets of some heads in the holder's share of a block and in ours."""

    remote_block: int  # bytes from one block to the next, at the holder
    local_block: int  # the same here
    pieces: tuple[ByteRange, ...]  # of one block, relative to its start

    @property
    def num_bytes(self) -> int:
        """Bytes to read for one block."""
        return sum(piece.num_bytes for piece in self.pieces)

    @functools.cached_property
    def table(self) -> RangeTable:
        """The pieces as rows."""
        return np.array(self.pieces, dtype=np.int64)

    @functools.cached_property
    def is_whole(self) -> bool:
        """True if these heads fill the share of a block on both sides, so that neighbouring blocks have no gap."""
        return len(self.pieces) == 1 and self.pieces[0].num_bytes == self.remote_block == self.local_block


def assign_heads(rank: int, heads: range, holders: Sequence[range]) -> list[AssignedHeads]:
    """Assign each of the `heads` of the reader's rank `rank` to the holder's rank from which to read it.

    `holders` has the heads that each rank of the holder keeps. If n ranks keep a head, rank r of the reader takes the
    (r mod n)-th of them. Raises `TransportError` for a head that no rank keeps.
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
    """Locate `heads` in a block, on the holder's rank, which keeps `remote`, and on our rank, which keeps `local`."""
    if remote == local:
        both = layout.pieces(local, heads)
        pieces = [ByteRange(piece.offset, piece.offset, piece.num_bytes) for piece in both]
    else:  # one side may have these heads in one piece and the other not: cut both into the same sections
        theirs, ours = layout.sections(remote, heads), layout.sections(local, heads)
        pieces = [ByteRange(at.offset, here.offset, at.num_bytes) for at, here in zip(theirs, ours, strict=True)]
    return HeadSlice(layout.bytes_of(remote), layout.bytes_of(local), tuple(pieces))


def block_ranges(
    source_blocks: Sequence[int] | BlockNumbers,
    local_blocks: Sequence[int] | BlockNumbers,
    piece: HeadSlice,
    remote_start: int = 0,
    local_start: int = 0,
) -> RangeTable:
    """Return the ranges to read, in order and as few as possible: neighbouring whole blocks share one.

    Block 0 begins at byte `remote_start` of the holder's region and at byte `local_start` of ours. Raises `ValueError`
    if the two lists of blocks differ in length.
    """
    sources, locals_ = (np.asarray(blocks, dtype=np.int64) for blocks in (source_blocks, local_blocks))
    if len(sources) != len(locals_):
        raise ValueError(f"{len(sources)} blocks of the holder, {len(locals_)} of ours")
    counts: BlockNumbers | int = 1
    if piece.is_whole and len(sources) > 1:
        goes_on = (sources[1:] == sources[:-1] + 1) & (locals_[1:] == locals_[:-1] + 1)  # the previous, on both sides
        if goes_on.any():
            first = np.flatnonzero(np.concatenate(((True,), ~goes_on)))
            counts = (np.concatenate((first[1:], (len(sources),))) - first)[:, None]
            sources, locals_ = sources[first], locals_[first]
    pieces = piece.table
    ranges = np.empty((3, len(sources), len(pieces)), dtype=np.int64)  # so that each column is contiguous
    np.add((sources * piece.remote_block)[:, None], pieces[:, 0] + remote_start, out=ranges[0])
    np.add((locals_ * piece.local_block)[:, None], pieces[:, 1] + local_start, out=ranges[1])
    np.multiply(counts, pieces[:, 2], out=ranges[2])
    return ranges.reshape(3, -1).T


def arenas_of(firsts: Sequence[int], blocks: Sequence[int] | BlockNumbers) -> NDArray[np.int64]:
    """Return for each block the index of its arena, given the first block of each arena."""
    return np.searchsorted(np.asarray(firsts), np.asarray(blocks, dtype=np.int64), side="right") - 1


def bytes_of(region: CacheRegion, blocks: Sequence[int] | BlockNumbers) -> NDArray[np.int64]:
    """Return the size in bytes of this rank's share of each of these blocks."""
    sizes = np.array([arena.block_bytes for arena in region.arenas])
    return sizes[arenas_of(region.first_blocks, blocks)]

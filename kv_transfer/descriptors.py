"""From block ids to byte ranges.

    holder's blocks   7  8  9  3        one range where both sides ascend together:
    our blocks        2  3  4  5        [7..9] -> [2..4], [3] -> [5]

A block is one contiguous range for all layers and heads (`engine/core/layout.py`): whole blocks need nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .transports import ByteRange


def block_ranges(source_blocks: Sequence[int], local_blocks: Sequence[int], block_bytes: int) -> list[ByteRange]:
    """One range for each stretch of blocks that are neighbours on both sides, in order."""
    ranges: list[ByteRange] = []
    start = 0
    for index in range(1, len(source_blocks) + 1):
        if index == len(source_blocks) or not _neighbours(source_blocks, local_blocks, index):
            num_bytes = (index - start) * block_bytes
            ranges.append(ByteRange(source_blocks[start] * block_bytes, local_blocks[start] * block_bytes, num_bytes))
            start = index
    return ranges


def batches(ranges: Sequence[ByteRange], max_bytes: int) -> Iterator[list[ByteRange]]:
    """The same ranges in batches of at most `max_bytes`; a longer range is cut."""
    batch: list[ByteRange] = []
    room = max_bytes
    for remote, local, left in ranges:
        while left:
            piece = min(left, room)
            batch.append(ByteRange(remote, local, piece))
            remote, local, left, room = remote + piece, local + piece, left - piece, room - piece
            if room == 0:
                yield batch
                batch, room = [], max_bytes
    if batch:
        yield batch


def _neighbours(source_blocks: Sequence[int], local_blocks: Sequence[int], index: int) -> bool:
    before = index - 1
    return source_blocks[index] == source_blocks[before] + 1 and local_blocks[index] == local_blocks[before] + 1

"""How many sequences the steps have that are prepared ahead; a smaller one is filled up with padding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence


def decode_sizes(max_num_seqs: int) -> list[int]:
    """In ascending order, up to `max_num_seqs`."""
    return list(_sizes(max_num_seqs))


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest of the ascending `sizes` that holds so many; None where none does."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def _sizes(max_num_seqs: int) -> Iterator[int]:
    size = 1
    while size < max_num_seqs:
        yield size
        size += size if size < 8 else 8 if size < 64 else 16 if size < 128 else 32
    yield max_num_seqs

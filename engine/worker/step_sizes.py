"""How many sequences the steps have that are prepared ahead; a smaller one is filled up with padding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

# At these sizes the matrix products of torch's library take longer than at the next larger one.
_SLOW = frozenset({192, 224, 240})


def decode_sizes(max_num_seqs: int) -> list[int]:
    """In ascending order, up to `max_num_seqs`."""
    return list(_sizes(max_num_seqs))


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest of the ascending `sizes` that holds so many; None where none does."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def _sizes(max_num_seqs: int) -> Iterator[int]:
    """By eights, then by sixteens, later by 32, but for what `_SLOW` says."""
    size = 1
    while size < max_num_seqs:
        if size not in _SLOW:
            yield size
        size += size if size < 8 else 8 if size < 64 else 16 if size < 256 else 32
    yield max_num_seqs

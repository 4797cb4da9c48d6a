"""Blocks become as few byte ranges as both sides allow, and batches of them lose nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.descriptors import batches, block_ranges
from baton.kv_transfer.transports import ByteRange


def test_neighbours_on_both_sides_are_one_range() -> None:
    assert block_ranges([7, 8, 9, 3], [2, 3, 4, 5], 100) == [ByteRange(700, 200, 300), ByteRange(300, 500, 100)]


def test_neighbours_on_one_side_only_are_two() -> None:
    assert len(block_ranges([1, 2], [5, 9], 100)) == len(block_ranges([5, 9], [1, 2], 100)) == 2


def test_descending_blocks_are_not_a_run() -> None:
    assert len(block_ranges([3, 2, 1], [3, 2, 1], 100)) == 3


def test_no_blocks_are_no_ranges() -> None:
    assert block_ranges([], [], 100) == []


def test_a_long_range_is_cut_into_batches() -> None:
    assert list(batches([ByteRange(0, 50, 250)], 100)) == [
        [ByteRange(0, 50, 100)],
        [ByteRange(100, 150, 100)],
        [ByteRange(200, 250, 50)],
    ]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30),
    st.integers(1, 9),
    st.integers(1, 60),
)
def test_every_byte_goes_where_its_block_goes(pairs: list[tuple[int, int]], block_bytes: int, max_bytes: int) -> None:
    source, target = [remote for remote, _ in pairs], [local for _, local in pairs]
    expected = [(r * block_bytes + i, to * block_bytes + i) for r, to in pairs for i in range(block_bytes)]
    cut = list(batches(block_ranges(source, target, block_bytes), max_bytes))
    moved = [(p.remote + i, p.local + i) for batch in cut for p in batch for i in range(p.num_bytes)]
    assert moved == expected
    assert all(0 < sum(piece.num_bytes for piece in batch) <= max_bytes for batch in cut)

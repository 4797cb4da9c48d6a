"""Blocks become as few byte ranges as both sides allow, and every head of every block goes where it belongs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.engine.core.layout import KVLayout, StateLayout, StatePart, StateRows, UnevenHeads
from baton.kv_transfer.descriptors import AssignedHeads, HeadSlice, assign_heads, block_ranges, slice_heads
from baton.kv_transfer.errors import TransportError
from baton.kv_transfer.transports import ByteRange

WHOLE = HeadSlice(remote_block=100, local_block=100, pieces=(ByteRange(0, 0, 100),))


def a_layout(num_heads: int) -> KVLayout:
    return KVLayout(
        model="any", num_layers=1, num_kv_heads=num_heads, head_dim=1, dtype="float8_e4m3fn", num_planes=1, block_size=3
    )


def kept_by(size: int, num_heads: int) -> list[range]:
    return [a_layout(num_heads).heads_of(rank, size) for rank in range(size)]


def ranges_of(source: list[int], local: list[int], piece: HeadSlice) -> list[ByteRange]:
    return [ByteRange(*row) for row in block_ranges(source, local, piece).tolist()]


def test_neighbours_on_both_sides_are_one_range() -> None:
    assert ranges_of([7, 8, 9, 3], [2, 3, 4, 5], WHOLE) == [ByteRange(700, 200, 300), ByteRange(300, 500, 100)]


def test_neighbours_on_one_side_only_are_two() -> None:
    assert len(block_ranges([1, 2], [5, 9], WHOLE)) == len(block_ranges([5, 9], [1, 2], WHOLE)) == 2


def test_descending_blocks_are_not_a_run() -> None:
    assert len(block_ranges([3, 2, 1], [3, 2, 1], WHOLE)) == 3


def test_no_blocks_are_no_ranges() -> None:
    assert ranges_of([], [], WHOLE) == []


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks of the holder, 1 of ours"):
        block_ranges([1, 2], [3], WHOLE)


@pytest.mark.parametrize(("remote", "local"), [(range(4), range(2, 4)), (range(2, 4), range(4)), (range(4), range(4))])
def test_a_part_of_either_sides_share_is_one_range_a_block(remote: range, local: range) -> None:
    layout = msgspec.structs.replace(a_layout(4), block_size=10)
    part = slice_heads(layout, range(2, 4), remote, local)
    assert part.num_bytes == 20
    ranges = ranges_of([0, 1, 2], [0, 1, 2], part)
    assert [piece.num_bytes for piece in ranges] == [20, 20, 20]
    assert [piece.remote for piece in ranges] == [(2 - remote.start) * 10 + len(remote) * 10 * b for b in range(3)]
    assert [piece.local for piece in ranges] == [(2 - local.start) * 10 + len(local) * 10 * b for b in range(3)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_groups_of_one_size_pair_rank_by_rank(size: int) -> None:
    kept = kept_by(size, 8)
    assert [assign_heads(rank, kept[rank], kept) for rank in range(size)] == [
        [AssignedHeads(r, kept[r])] for r in range(size)
    ]


def test_heads_that_are_neighbours_on_a_rank_go_together() -> None:
    assert assign_heads(0, range(8), kept_by(2, 8)) == [AssignedHeads(0, range(4)), AssignedHeads(1, range(4, 8))]
    assert assign_heads(1, range(4, 8), kept_by(4, 8)) == [AssignedHeads(2, range(4, 6)), AssignedHeads(3, range(6, 8))]
    assert assign_heads(3, range(6, 8), kept_by(2, 8)) == [AssignedHeads(1, range(6, 8))]


def test_readers_take_turns_at_ranks_that_keep_the_same_head() -> None:
    latents = kept_by(4, 1)
    assert [assign_heads(rank, range(1), latents)[0].holder_rank for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [assign_heads(rank, kept_by(8, 2)[rank], kept_by(4, 2))[0].holder_rank for rank in range(8)] == [
        *(0, 1, 0, 1),
        *(2, 3, 2, 3),
    ]


def test_a_head_that_nobody_keeps_is_named() -> None:
    with pytest.raises(TransportError, match="KV head 2 is on none of the holder's 1 ranks"):
        assign_heads(0, range(4), [range(2)])


@pytest.mark.parametrize(("heads", "size"), [(8, 3), (2, 3), (6, 4), (5, 2)])
def test_heads_that_do_not_divide_are_refused(heads: int, size: int) -> None:
    with pytest.raises(UnevenHeads, match=f"{heads} KV heads cannot be shared out over {size} ranks"):
        a_layout(heads).heads_of(0, size)


@st.composite
def two_groups(draw: st.DrawFn) -> tuple[int, int, int]:
    """KV heads of a model, and two numbers of ranks over which they can be shared out."""
    heads = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12)))
    sizes = [size for size in range(1, 17) if heads % size == 0 or size % heads == 0]
    return heads, draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))


@given(
    two_groups(),
    st.lists(st.integers(0, 11), max_size=12),
    st.permutations(range(12)),
)
def test_every_byte_of_every_rank_is_written_once_and_from_the_right_place(
    groups: tuple[int, int, int], source: list[int], targets: list[int]
) -> None:
    num_heads, holder_size, reader_size = groups
    head_bytes = a_layout(num_heads).head_bytes
    target = targets[: len(source)]
    holders, readers = kept_by(holder_size, num_heads), kept_by(reader_size, num_heads)
    for rank, heads in enumerate(readers):
        written: dict[int, tuple[int, int, int]] = {}  # offset at the reader: block, head and byte at the holder
        for share in assign_heads(rank, heads, holders):
            remote = holders[share.holder_rank]
            for piece in ranges_of(source, target, slice_heads(a_layout(num_heads), share.heads, remote, heads)):
                assert piece.num_bytes > 0
                for at in range(piece.num_bytes):
                    block, inside = divmod(piece.remote + at, len(remote) * head_bytes)
                    assert piece.local + at not in written
                    written[piece.local + at] = block, remote[inside // head_bytes], inside % head_bytes
        assert written == {
            (to * len(heads) + place) * head_bytes + byte: (block, head, byte)
            for block, to in zip(source, target, strict=True)
            for place, head in enumerate(heads)
            for byte in range(head_bytes)
        }


@given(two_groups(), st.integers(1, 12))
def test_there_is_one_range_a_rank_for_a_run_and_else_one_a_block(groups: tuple[int, int, int], count: int) -> None:
    num_heads, holder_size, reader_size = groups
    holders, readers = kept_by(holder_size, num_heads), kept_by(reader_size, num_heads)
    blocks = list(range(count))
    for rank, heads in enumerate(readers):
        found = assign_heads(rank, heads, holders)
        assert len(found) == len({head // len(holders[0]) for head in heads})
        for share in found:
            remote = holders[share.holder_rank]
            whole = share.heads == remote == heads
            piece = slice_heads(a_layout(num_heads), share.heads, remote, heads)
            assert len(block_ranges(blocks, blocks, piece)) == (1 if whole else count)


STATES = {
    "delta net": StateLayout(
        model="any",
        num_layers=2,
        parts=(
            StatePart((72, 3), "float8_e4m3fn", rows=(StateRows(12, 2), StateRows(12, 2), StateRows(24, 1))),
            StatePart((24, 5, 1), "bfloat16"),
        ),
    ),
    "groups that are fewer than ranks": StateLayout(
        model="any",
        num_layers=1,
        parts=(
            StatePart((18, 3), "bfloat16", rows=(StateRows(12, 1), StateRows(2, 2), StateRows(1, 2))),
            StatePart((12, 2, 2), "float32"),
        ),
    ),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 6), (6, 2), (2, 2), (1, 6), (6, 1), (4, 2), (2, 4), (12, 6)])
def test_every_rank_has_the_rows_of_a_state_that_it_would_have_computed(name: str, sizes: tuple[int, int]) -> None:
    layout, (holder_size, reader_size) = STATES[name], sizes
    whole = {(layer, part): content_of(layout, layer, part) for layer in range(layout.num_layers) for part in range(2)}
    slots = [np.concatenate([slot_of(layout, whole, rank, holder_size)] * 2) for rank in range(holder_size)]
    holders = [layout.heads_of(rank, holder_size) for rank in range(holder_size)]
    for rank in range(reader_size):
        heads, expected = layout.heads_of(rank, reader_size), slot_of(layout, whole, rank, reader_size)
        found = np.zeros(2 * len(expected), dtype=np.uint8)
        for share in assign_heads(rank, heads, holders):
            piece = slice_heads(layout, share.heads, holders[share.holder_rank], heads)
            assert piece.is_whole == (holder_size == reader_size)
            for remote, local, size in block_ranges([1], [1], piece).tolist():
                found[local : local + size] = slots[share.holder_rank][remote : remote + size]
        assert np.array_equal(found[len(expected) :], expected)
        assert not found[: len(expected)].any(), "the slot before it was written"


def content_of(layout: StateLayout, layer: int, part: int) -> NDArray[np.uint8]:
    """The bytes of one part of a layer's state, one row of its first dimension a row."""
    rows, row_bytes = layout.parts[part].shape[0], layout.parts[part].row_bytes
    return np.random.default_rng(2 * layer + part).integers(1, 255, (rows, row_bytes), dtype=np.uint8)


def slot_of(
    layout: StateLayout, whole: Mapping[tuple[int, int], NDArray[np.uint8]], rank: int, size: int
) -> NDArray[np.uint8]:
    """The slot that one of `size` ranks keeps: its share of each kind of rows, each part on a cache line of its own."""
    own = layout.of_rank(rank, size)
    slot = np.zeros(own.block_bytes, dtype=np.uint8)
    for (layer, part), content in whole.items():
        kept, before = [], 0
        for rows in layout.parts[part].sections:
            first = rank * rows.count // size  # of several ranks that keep the same, each has it
            many = max(1, rows.count // size)
            kept.append(content[before + first * rows.width : before + (first + many) * rows.width])
            before += rows.count * rows.width
        flat = np.concatenate(kept).reshape(-1)
        start = layer * own.layer_bytes + own.offsets[part]
        slot[start : start + len(flat)] = flat
    return slot

"""The bytes of tiers are divided over cache groups, and numbers of slots tell the group."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.layout import CacheKind, CacheLayout, GroupLayout, KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.core.tiers import Tier
from baton.kv_transfer.settings import TierSettings
from baton.kv_transfer.tiers.disk_files import TierRefused
from baton.kv_transfer.tiers.division import TierDivision, check_sizes, divide_bytes, fewest_bytes
from baton.kv_transfer.tiers.tier_index import Move, TierIndex

LAYOUT = KVLayout(model="small", num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16")  # 8 KB a block
BLOCK = LAYOUT.block_bytes


def region_of(*num_blocks: int) -> CacheRegion:
    """Arenas of blocks that are alike, of a full group and of windows."""
    groups, arenas, address = [], [], 1 << 20
    for number, count in enumerate(num_blocks):
        kind, window = (CacheKind.WINDOW, 16 * number) if number else (CacheKind.FULL, None)
        groups.append(GroupLayout(kind=kind, window=window, layers=(2 * number, 2 * number + 1), blocks=LAYOUT))
        arenas.append(ArenaRegion(address, count, "cpu", LAYOUT, 0, 2))
        address += count * BLOCK
    return CacheRegion(CacheLayout(tuple(groups)), tuple(arenas))


def test_groups_share_a_tier_as_their_arenas_share_memory() -> None:
    settings = TierSettings(host_bytes=40 * BLOCK, disk_path="/d", disk_bytes=400 * BLOCK)
    full, window = TierDivision(region_of(30, 10), settings).groups
    assert [(each.num_host_slots, each.num_disk_slots) for each in (full, window)] == [(30, 300), (10, 100)]


def test_one_group_has_all_of_it_and_the_names_that_it_always_had() -> None:
    division = TierDivision(region_of(7), TierSettings(host_bytes=5 * BLOCK + 1))
    (only,) = division.groups
    assert (only.name, only.fingerprint, only.num_host_slots) == ("", LAYOUT.fingerprint, 5)
    assert division.block_sizes == [1.0]


def test_groups_whose_blocks_are_alike_have_fingerprints_and_folders_of_their_own() -> None:
    groups = TierDivision(region_of(30, 10, 10), TierSettings(host_bytes=100 * BLOCK)).groups
    assert len({group.fingerprint for group in groups}) == len({group.name for group in groups}) == 3
    assert [group.name.split("-")[0] for group in groups] == ["full", "window", "window"]


@given(
    num_bytes=st.integers(0, 10**7),
    arenas=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5000)), min_size=1, max_size=4),
)
def test_a_tier_is_never_exceeded_and_holds_a_block_of_each_group_from_the_fewest_bytes_on(
    num_bytes: int, arenas: list[tuple[int, int]]
) -> None:
    block_bytes = [size for _, size in arenas]
    arena_bytes = [count * size for count, size in arenas]
    slots = divide_bytes(num_bytes, arena_bytes, block_bytes)
    assert sum(count * size for count, size in zip(slots, block_bytes, strict=True)) <= num_bytes
    assert all(slots) == (num_bytes >= fewest_bytes(arena_bytes, block_bytes))


def test_a_tier_too_small_for_a_group_is_refused_with_what_would_do() -> None:
    region = region_of(30, 10)
    check_sizes(region, TierSettings(host_bytes=4 * BLOCK))
    with pytest.raises(TierRefused, match=rf"host_bytes is 100, .*\(full, window\): give at least {4 * BLOCK}"):
        check_sizes(region, TierSettings(host_bytes=100))


def test_numbers_tell_the_group_and_no_move_joins_two() -> None:
    division = TierDivision(region_of(30, 10), TierSettings(host_bytes=40 * BLOCK))
    move = Move(bytes(16), Tier.POOL, 33, Tier.HOST, 31)
    assert division.group_of(move) == 1
    assert division.in_group(move, 1) == Move(bytes(16), Tier.POOL, 3, Tier.HOST, 1)
    assert not division.joins_groups(move)
    assert division.joins_groups(move._replace(target_slot=29))


def test_the_slots_of_an_index_begin_where_its_group_does() -> None:
    index = TierIndex(2, 1, [(bytes(16), 50)], first_host_slot=30, first_disk_slot=50)
    moves = index.store([b"a" * 16, b"b" * 16], [33, 34])
    assert [move.target_slot for move in moves] == [30, 31]
    assert index.restore([bytes(16)], [35])[0].source_slot == 50
    index.check()


def test_another_window_or_other_layers_are_another_group() -> None:
    group = region_of(3, 3).caches.groups[1]
    for changed in ({"window": 17}, {"layers": (2, 4)}, {"kind": CacheKind.FULL}):
        assert msgspec.structs.replace(group, **changed).fingerprint != group.fingerprint

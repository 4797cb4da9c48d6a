"""Cache groups follow from what each layer keeps, and the format of models with one group is what it always was."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.core.layout import (
    CacheKind,
    CacheLayout,
    CachePlace,
    KVLayout,
    LayerCache,
    LayerState,
    SeveralGroups,
    StatePart,
    StateRows,
    UnevenHeads,
)

FULL = LayerCache(kind=CacheKind.FULL, num_kv_heads=4, head_dim=64, dtype="bfloat16")
WINDOW = msgspec.structs.replace(FULL, kind=CacheKind.WINDOW, window=128)
STATE = LayerState((StatePart((96, 3), "bfloat16", (StateRows(4, 16), StateRows(2, 16))),))
WIDE = msgspec.structs.replace(FULL, head_dim=256, num_kv_heads=2)


def test_layers_that_keep_the_same_are_one_group_whose_blocks_are_those_of_the_model() -> None:
    caches = CacheLayout.of_layers("m", [(FULL,)] * 5)
    whole = KVLayout(model="m", num_layers=5, num_kv_heads=4, head_dim=64, dtype="bfloat16")
    assert caches.only.blocks == whole
    assert caches.fingerprint == whole.fingerprint
    assert [caches.place_of(layer) for layer in range(5)] == [CachePlace(0, layer) for layer in range(5)]


def test_the_fingerprint_of_a_layout_is_that_of_engines_that_run_already() -> None:
    layout = KVLayout(model="m", num_layers=5, num_kv_heads=4, head_dim=64, dtype="bfloat16")
    assert layout.fingerprint == "5667523cf039ab8373925472beadfd9d"


def test_groups_without_a_window_come_first_and_a_layer_has_its_place_in_its_group() -> None:
    caches = CacheLayout.of_layers("m", [(WINDOW,), (FULL,), (WINDOW,), (WIDE,), (FULL,)])
    assert [group.layers for group in caches.groups] == [(1, 4), (3,), (0, 2)]
    assert [group.window for group in caches.groups] == [None, None, 128]
    assert [group.blocks.num_layers for group in caches.groups] == [2, 1, 2]
    assert [caches.place_of(layer) for layer in range(5)] == [
        CachePlace(2, 0), CachePlace(0, 0), CachePlace(2, 1), CachePlace(1, 0), CachePlace(0, 1)
    ]  # fmt: skip
    with pytest.raises(SeveralGroups, match="3 different kinds"):
        _ = caches.only


def test_what_layers_keep_and_in_which_order_is_in_the_fingerprint() -> None:
    layouts = [[FULL, WINDOW], [WINDOW, FULL], [FULL, msgspec.structs.replace(WINDOW, window=64)], [FULL, WIDE]]
    prints = {CacheLayout.of_layers("m", [(kept,) for kept in layers]).fingerprint for layers in layouts}
    assert len(prints) == len(layouts)


def test_a_rank_keeps_its_heads_of_every_group() -> None:
    part = CacheLayout.of_layers("m", [(FULL,), (WIDE,)]).of_rank(1, 4)
    assert [group.blocks.num_kv_heads for group in part.groups] == [1, 1]


def test_a_layer_keeps_nothing_one_thing_or_keys_and_values_beside_a_state() -> None:
    caches = CacheLayout.of_layers("m", [(STATE,), (FULL, STATE), (), (FULL,)])
    assert [group.kind for group in caches.groups] == [CacheKind.FULL, CacheKind.STATE]
    assert [group.layers for group in caches.groups] == [(1, 3), (0, 1)]
    assert [caches.place_of(layer) for layer in (1, 3)] == [CachePlace(0, 0), CachePlace(0, 1)]
    assert [caches.state_place_of(layer) for layer in (0, 1)] == [CachePlace(1, 0), CachePlace(1, 1)]


def test_ranks_divide_the_heads_of_a_state_and_share_groups_that_are_fewer() -> None:
    (part,) = STATE.parts
    assert part.of_ranks(2).shape == (2 * 16 + 16, 3)
    assert part.of_ranks(4).shape == (16 + 16, 3)
    with pytest.raises(UnevenHeads, match="4 heads or groups"):
        part.of_ranks(3)

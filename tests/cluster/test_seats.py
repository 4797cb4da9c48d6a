"""Which rank of a group sits where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.engines.group import places_of
from baton.cluster.engines.launch import Doors, Opening, Place
from baton.cluster.engines.seats import seats_of


def nodes_of(nodes: list[str], tp_size: int) -> str:
    """The node of each rank."""
    return "".join(nodes[seat.bundle] for seat in seats_of(nodes, tp_size))


@pytest.mark.parametrize(
    ("bundles", "tp_size", "ranks"),
    [
        ("a", 1, "a"),
        ("abab", 2, "aabb"),
        ("abba", 1, "aabb"),
        ("abbbbb", 2, "abbbbb"),
        ("abbbb", 2, "bbbba"),
        ("aabbbbcc", 4, "bbbbaacc"),
        ("abcabcabc", 3, "aaabbbccc"),
    ],
)
def test_ranks_that_follow_each_other_share_a_node(bundles: str, tp_size: int, ranks: str) -> None:
    assert nodes_of(list(bundles), tp_size) == ranks


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16), st.sampled_from([1, 2, 4]))
def test_every_bundle_has_one_rank_and_nodes_are_not_mixed(nodes: list[str], tp_size: int) -> None:
    seats = seats_of(nodes, tp_size)
    assert [seat.rank for seat in seats] == list(range(len(nodes)))
    assert sorted(seat.bundle for seat in seats) == list(range(len(nodes)))
    order = nodes_of(nodes, tp_size)
    assert len("".join(dict.fromkeys(order))) == sum(order[i] != order[i - 1] for i in range(1, len(order))) + 1
    for node in set(nodes):
        here = [seat for seat in seats if nodes[seat.bundle] == node]
        assert [seat.local_rank for seat in here] == list(range(len(here)))
        assert {seat.num_local for seat in here} == {len(here)}


def test_ranks_are_told_where_to_meet_and_see_the_gpus_of_their_node() -> None:
    seats = seats_of(["a", "b", "a", "b"], 2)
    openings = [
        Opening("all", Doors("first"), ("3",)),
        Opening(gpus=("1",)),
        Opening("", Doors("second"), ("0",)),
        Opening(gpus=("7",)),
    ]
    assert places_of(seats, openings, 2) == [
        Place("all", Doors("first"), ("3", "1")),
        Place("all", Doors("first"), ("3", "1")),
        Place("all", Doors("second"), ("0", "7")),
        Place("all", Doors("second"), ("0", "7")),
    ]


def test_a_rank_alone_meets_nobody_and_sees_what_ray_gave_it() -> None:
    assert places_of(seats_of(["a"], 1), [Opening(gpus=("5",))], 1) == [Place()]

"""Assignment of a group's ranks to the nodes of its bundles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.engines.group import rank_configs
from baton.cluster.engines.launch import GroupEndpoints, RankConfig, RankEndpoints, assign_ranks


def nodes_of(nodes: list[str], tp_size: int) -> str:
    """Return the node of each rank, joined to one string."""
    return "".join(nodes[each.bundle] for each in assign_ranks(nodes, tp_size))


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
def test_consecutive_ranks_share_a_node(bundles: str, tp_size: int, ranks: str) -> None:
    assert nodes_of(list(bundles), tp_size) == ranks


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16), st.sampled_from([1, 2, 4]))
def test_every_bundle_has_one_rank_and_nodes_are_not_mixed(nodes: list[str], tp_size: int) -> None:
    assignments = assign_ranks(nodes, tp_size)
    assert [each.rank for each in assignments] == list(range(len(nodes)))
    assert sorted(each.bundle for each in assignments) == list(range(len(nodes)))
    order = nodes_of(nodes, tp_size)
    assert len("".join(dict.fromkeys(order))) == sum(order[i] != order[i - 1] for i in range(1, len(order))) + 1
    for node in set(nodes):
        here = [each for each in assignments if nodes[each.bundle] == node]
        assert [each.local_rank for each in here] == list(range(len(here)))
        assert {each.num_local for each in here} == {len(here)}


def test_ranks_get_their_rendezvous_and_see_the_gpus_of_their_node() -> None:
    assignments = assign_ranks(["a", "b", "a", "b"], 2)
    endpoints = [
        RankEndpoints("all", GroupEndpoints("first"), ("3",)),
        RankEndpoints(gpus=("1",)),
        RankEndpoints("", GroupEndpoints("second"), ("0",)),
        RankEndpoints(gpus=("7",)),
    ]
    assert rank_configs(assignments, endpoints, 2) == [
        RankConfig("all", GroupEndpoints("first"), ("3", "1")),
        RankConfig("all", GroupEndpoints("first"), ("3", "1")),
        RankConfig("all", GroupEndpoints("second"), ("0", "7")),
        RankConfig("all", GroupEndpoints("second"), ("0", "7")),
    ]


def test_a_single_rank_has_no_rendezvous_and_keeps_rays_gpus() -> None:
    assert rank_configs(assign_ranks(["a"], 1), [RankEndpoints(gpus=("5",))], 1) == [RankConfig()]

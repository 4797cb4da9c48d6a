"""Assigns ranks to bundles: bundles of a placement group that follow each other need not share a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankAssignment:
    """One rank of a group: its bundle, and its number among the ranks of its node."""

    rank: int
    bundle: int  # index into the group's placement group
    local_rank: int
    num_local: int
    node: str


def assign_ranks(nodes: Sequence[str], tp_size: int) -> list[RankAssignment]:
    """Assign a rank to each bundle, given the bundles' nodes: consecutive ranks share a node where they can.

    Nodes that hold whole tensor-parallel groups come first, so that few groups span two nodes.
    """
    count = Counter(nodes)
    first_seen = {node: index for index, node in reversed(list(enumerate(nodes)))}

    def sort_key(bundle: int) -> tuple[bool, int, int]:
        node = nodes[bundle]
        return count[node] % tp_size != 0, first_seen[node], bundle

    order = sorted(range(len(nodes)), key=sort_key)
    on_node: Counter[str] = Counter()
    assignments = []
    for rank, bundle in enumerate(order):
        node = nodes[bundle]
        assignments.append(RankAssignment(rank, bundle, local_rank=on_node[node], num_local=count[node], node=node))
        on_node[node] += 1
    return assignments

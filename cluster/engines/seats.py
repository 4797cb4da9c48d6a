"""Which rank of a group sits where: bundles of a placement group that follow each other need not share a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """One rank's place in a group, and among those of its machine."""

    rank: int
    bundle: int  # of the group's placement group
    local_rank: int
    num_local: int
    node: str


def seats_of(nodes: Sequence[str], tp_size: int) -> list[Seat]:
    """Who sits where, given the node of each bundle: ranks that follow each other share a node where they can.

    Nodes that hold whole tensor-parallel groups come first, so that few groups span two nodes.
    """
    count = Counter(nodes)
    first_seen = {node: index for index, node in reversed(list(enumerate(nodes)))}

    def place(bundle: int) -> tuple[bool, int, int]:
        node = nodes[bundle]
        return count[node] % tp_size != 0, first_seen[node], bundle

    order = sorted(range(len(nodes)), key=place)
    on_node: Counter[str] = Counter()
    seats = []
    for rank, bundle in enumerate(order):
        node = nodes[bundle]
        seats.append(Seat(rank, bundle, local_rank=on_node[node], num_local=count[node], node=node))
        on_node[node] += 1
    return seats

"""The data that a replica and its workers exchange before the engine starts, and the assignment of ranks to nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.settings import TierSettings

STOP_S = 3.0  # in which workers may end by themselves; tiers that save blocks get more


@dataclass(frozen=True)
class EngineLaunch:
    """The settings with which a process joins one group of an application."""

    spec: FleetSpec
    role: Role
    group_id: str
    app: str
    key: ClusterKey

    @property
    def tensor_parallel_size(self) -> int:
        return self.spec.engine_config(self.role).tensor_parallel_size

    @property
    def world_size(self) -> int:
        return self.spec.engine_config(self.role).world_size

    @property
    def transfers_kv(self) -> bool:
        return self.role is not Role.UNIFIED

    @property
    def tiers(self) -> TierSettings | None:
        return self.spec.fleets.present[self.role].kv_tiers

    @property
    def stop_s(self) -> float:
        """Return the seconds in which workers may end by themselves before they are killed."""
        return STOP_S + (0.0 if self.tiers is None else self.tiers.save_s)


@dataclass(frozen=True)
class GroupEndpoints:
    """The addresses at which a leader's tensor-parallel ranks join it; empty for work that they do not share."""

    reads: str = ""  # for reads of other engines' blocks
    copies: str = ""  # for copies between blocks and the host buffer
    tiers: str = ""


@dataclass(frozen=True)
class RankEndpoints:
    """The addresses and GPUs that one rank offers to its group."""

    rendezvous: str = ""  # rank 0 only: "host:port" where all ranks meet
    group: GroupEndpoints = GroupEndpoints()  # leaders only
    gpus: tuple[str, ...] = ()  # reserved by Ray for this rank


@dataclass(frozen=True)
class RankConfig:
    """The model's folder, addresses and GPUs for one rank. In a group of one rank, addresses and GPUs are empty."""

    rendezvous: str = ""
    group: GroupEndpoints = GroupEndpoints()  # the sockets of its leader
    gpus: tuple[str, ...] = ()  # of all ranks on its machine, by local rank: ranks access each other's GPU memory
    model: str = ""  # folder on the rank's machine


@dataclass(frozen=True)
class RankAssignment:
    """One rank of a group: its bundle, and its number among the ranks of its node."""

    rank: int
    bundle: int  # index into the group's placement group
    local_rank: int
    num_local: int
    node: str


def assign_ranks(nodes: Sequence[str], tp_size: int) -> list[RankAssignment]:
    """Assign a rank to each bundle, given the node of each bundle: consecutive ranks share a node where possible.

    Nodes whose ranks form whole tensor-parallel groups come first, so that few groups span two nodes.
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

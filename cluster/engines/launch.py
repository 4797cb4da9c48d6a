"""The data that a replica and its workers exchange before the engine runs, and the assignment of ranks to nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.settings import TierSettings

STOP_S = 3.0  # for workers to end by themselves, beside the time that tiers need to save blocks


@dataclass(frozen=True)
class EngineLaunch:
    """Everything that a process needs to become a member of one group of an application."""

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
        """Return the seconds that workers have to end by themselves, before they are killed."""
        return STOP_S + (0.0 if self.tiers is None else self.tiers.save_s)


@dataclass(frozen=True)
class GroupEndpoints:
    """The addresses at which a leader's tensor-parallel ranks join it; empty where they do nothing together."""

    reads: str = ""  # of peers' blocks
    copies: str = ""  # between blocks and the host buffer
    tiers: str = ""


@dataclass(frozen=True)
class RankEndpoints:
    """The addresses and GPUs that one rank offers to its group."""

    rendezvous: str = ""  # of rank 0: "host:port" where all ranks meet
    group: GroupEndpoints = GroupEndpoints()  # of a leader
    gpus: tuple[str, ...] = ()  # that Ray has reserved for this rank


@dataclass(frozen=True)
class RankConfig:
    """The model's folder for one rank, and the addresses and GPUs that it is to use: none in a group of one rank."""

    rendezvous: str = ""
    group: GroupEndpoints = GroupEndpoints()  # of its leader
    gpus: tuple[str, ...] = ()  # of all ranks of its machine, by local rank: peers reach into each other's memory
    model: str = ""  # on the rank's machine


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

"""The node of each rank, as Ray would place an application on given machines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton.cluster.contracts import Role
from baton.cluster.engines.launch import assign_ranks
from baton.cluster.spec import FleetSpec, Reservations

from .sizing import GB


@dataclass(frozen=True)
class Machines:
    """The nodes to plan for, which are all equal."""

    gpus_per_node: int = 8
    gpu_memory_bytes: int = 80 * GB
    nodes: int | None = None  # None: as many as are needed
    memory_bytes: int | None = None  # of one node, without its GPUs'; None: enough
    disk_bytes: int | None = None  # for tiers, of one node; None: enough
    has_fp8: bool = True  # the GPUs have FP8 tensor cores; on others, weights of 8 bits are expanded to 16

    @property
    def device(self) -> str:
        return "cuda" if self.gpus_per_node else "cpu"


@dataclass(frozen=True)
class RankPlan:
    """The placement of one worker."""

    role: Role
    group: int  # number within the fleet
    dp_rank: int
    tp_rank: int
    engine_rank: int  # rank of the engine that this worker belongs to, as gateways and clients use it
    node: int
    num_local: int  # ranks of its group on its node


def find_too_large_for_a_node(spec: FleetSpec, machines: Machines) -> Iterator[str]:
    """Yield a line for each fleet whose workers need more GPUs than a node has."""
    reservations = Reservations(spec, machines.gpus_per_node)
    for role in spec.fleets.present:
        each = reservations.gpus_of(role)
        if each > machines.gpus_per_node:
            yield f"{role}: a worker needs {each:g} GPUs, a node has {machines.gpus_per_node}"


def place_ranks(spec: FleetSpec, machines: Machines) -> Iterator[RankPlan]:
    """Place all ranks as Ray's PACK does: a group on as few nodes as possible, groups one after the other."""
    free: list[float] = []
    reservations = Reservations(spec, machines.gpus_per_node)
    for role, fleet in spec.fleets.present.items():
        config = spec.engine_config(role)
        each = reservations.gpus_of(role)
        for group in range(fleet.bounds.max_replicas):
            nodes = _pack(free, config.world_size, each, machines.gpus_per_node)
            first = spec.first_rank(role) + group * config.data_parallel_size
            for rank in assign_ranks([str(node) for node in nodes], config.tensor_parallel_size):
                dp_rank, tp_rank = divmod(rank.rank, config.tensor_parallel_size)
                yield RankPlan(role, group, dp_rank, tp_rank, first + dp_rank, nodes[rank.bundle], rank.num_local)


def _pack(free: list[float], size: int, each: float, per_node: int) -> list[int]:
    """Choose the node of each bundle; update the `free` GPUs of each node, and add nodes as needed.

    A bundle takes `each` GPUs of the `per_node`, which must suffice for one.
    """

    def capacity(node: int) -> int:
        return size if each == 0 else int(free[node] / each + 1e-9)

    if not free:
        free.append(per_node)
    nodes: list[int] = []
    while len(nodes) < size:
        left = size - len(nodes)
        whole = [node for node in range(len(free)) if capacity(node) >= left]
        node = whole[0] if whole else max(range(len(free)), key=capacity)
        taken = min(left, capacity(node))
        if taken == 0 or (not whole and not nodes and capacity(node) < min(size, math.floor(per_node / each))):
            free.append(per_node)
            continue
        free[node] -= taken * each
        nodes += [node] * taken
    return nodes

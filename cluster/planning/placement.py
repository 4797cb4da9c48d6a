"""The node of each rank, as Ray would place an application on given machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.cluster.contracts import Role
from baton.cluster.engines.launch import assign_ranks
from baton.cluster.spec import FleetSpec, Reservations
from baton.cluster.spec.reservations import WHOLE_GPU

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
    gpu: int | None  # number on the node of its GPU, or of the first of them; None: it reserves none
    num_local: int  # ranks of its group on its node


def find_too_large_for_a_node(spec: FleetSpec, machines: Machines) -> Iterator[str]:
    """Yield a line for each fleet whose workers need more GPUs than a node has."""
    reservations = Reservations(spec, machines.gpus_per_node)
    for role in spec.fleets.present:
        each = reservations.gpus_of(role)
        if each > machines.gpus_per_node:
            yield f"{role}: a worker needs {each:g} GPUs, a node has {machines.gpus_per_node}"


class _Node:
    """The GPUs of a node, and which share of each is not reserved, in ten-thousandths."""

    def __init__(self, num_gpus: int) -> None:
        self._free = [WHOLE_GPU] * num_gpus

    def capacity(self, each: float) -> int:
        """Return how many more bundles of `each` GPUs fit: a share is on a single GPU, above 1 they are whole."""
        if each < 1:
            return sum(free // round(each * WHOLE_GPU) for free in self._free)
        return self._free.count(WHOLE_GPU) // int(each)

    def take(self, each: float) -> int:
        """Take the GPUs of one bundle, which must fit. Returns the first one's number.

        As Ray does, put a share on the GPU that has the least left.
        """
        share = min(round(each * WHOLE_GPU), WHOLE_GPU)
        fitting = [gpu for gpu, free in enumerate(self._free) if free >= share]
        taken = [min(fitting, key=lambda gpu: self._free[gpu])] if each < 1 else fitting[: int(each)]
        for gpu in taken:
            self._free[gpu] -= share
        return taken[0]


def place_ranks(spec: FleetSpec, machines: Machines) -> Iterator[RankPlan]:
    """Place all ranks as Ray's PACK does: a group on as few nodes as possible, groups one after the other."""
    nodes: list[_Node] = []
    reservations = Reservations(spec, machines.gpus_per_node)
    for role, fleet in spec.fleets.present.items():
        config = spec.engine_config(role)
        each = reservations.gpus_of(role)
        for group in range(fleet.bounds.max_replicas):
            places = _pack(nodes, config.world_size, each, machines.gpus_per_node)
            first = spec.first_rank(role) + group * config.data_parallel_size
            for rank in assign_ranks([str(node) for node, _ in places], config.tensor_parallel_size):
                dp_rank, tp_rank = divmod(rank.rank, config.tensor_parallel_size)
                node, gpu = places[rank.bundle]
                yield RankPlan(role, group, dp_rank, tp_rank, first + dp_rank, node, gpu, rank.num_local)


def _pack(nodes: list[_Node], size: int, each: float, per_node: int) -> list[tuple[int, int | None]]:
    """Choose the node and the GPU of each bundle, which they then lack. Adds nodes as needed.

    A bundle takes `each` GPUs of the `per_node`, which must suffice for one.
    """

    def capacity(node: int) -> int:
        return size if each == 0 else nodes[node].capacity(each)

    if not nodes:
        nodes.append(_Node(per_node))
    places: list[tuple[int, int | None]] = []
    while len(places) < size:
        left = size - len(places)
        whole = [node for node in range(len(nodes)) if capacity(node) >= left]
        node = whole[0] if whole else max(range(len(nodes)), key=capacity)
        taken = min(left, capacity(node))
        if taken == 0 or (not whole and not places and taken < min(size, _Node(per_node).capacity(each))):
            nodes.append(_Node(per_node))
            continue
        places += [(node, nodes[node].take(each) if each else None) for _ in range(taken)]
    return places

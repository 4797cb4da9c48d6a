"""The plan of an application on given machines: placement, memory, KV blocks, bandwidth, refusals.

Everything follows from the application's arguments and the model's config.json, except the memory that a start
measures: `Plan.assumptions`, and the memory of steps, an estimate (`fleet_memory.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.cluster.contracts import Role
from baton.cluster.pluralize import pluralize
from baton.cluster.spec import FleetSpec, Reservations
from baton.engine.config import InvalidEngineConfig
from baton.engine.hf_config.errors import ModelError
from baton.engine.startup.arenas import engine_caches
from baton.engine.startup.kv_size import ENOUGH_FREE_BYTES
from baton.engine.startup.memory import DRIVER_BYTES

from .fleet_memory import FleetPlan, Traffic, plan_fleet
from .model_checks import read_model
from .placement import Machines, RankPlan, find_too_large_for_a_node, place_ranks
from .sizing import (
    GB,
    HostNeeds,
    find_overcommitted,
    find_too_small_tiers,
    handoff_bytes,
    needs_of_nodes,
    needs_of_worker,
)


@dataclass(frozen=True)
class Bandwidth:
    """The traffic of hand-offs at the target load, in bytes (`request`) and bytes a second (the others)."""

    request: int
    total: float
    prefill_rank: float
    decode_rank: float


@dataclass
class Plan:
    """An application on given machines, and the reasons why it could not run there."""

    spec: FleetSpec
    machines: Machines
    traffic: Traffic
    fleets: list[FleetPlan] = field(default_factory=list)
    ranks: list[RankPlan] = field(default_factory=list)
    hosts: list[HostNeeds] = field(default_factory=list)  # by node
    bandwidth: Bandwidth | None = None
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)  # about memory, which a start measures

    @property
    def num_nodes(self) -> int:
        return max((rank.node for rank in self.ranks), default=-1) + 1


def make_plan(spec: FleetSpec, machines: Machines, traffic: Traffic) -> Plan:
    """Plan an application. If it cannot work, nothing is raised: `refusals` has the reasons."""
    plan = Plan(spec, machines, traffic)
    plan.refusals += find_too_large_for_a_node(spec, machines)
    plan.ranks = [] if plan.refusals else list(place_ranks(spec, machines))
    if machines.nodes is not None and plan.num_nodes > machines.nodes:
        plan.refusals.append(
            f"{pluralize(plan.num_nodes, 'node')} needed, {machines.nodes} given: give more, or fewer or smaller groups"
        )
    for role in spec.fleets.present:
        try:
            plan.fleets.append(plan_fleet(spec, role, machines, _most_on_a_node(plan, role)))
        except (ModelError, InvalidEngineConfig) as error:
            plan.refusals.append(f"{role}: {error}")
    plan.refusals += _too_small_tiers(plan)
    plan.hosts = _hosts(plan)
    plan.refusals += find_overcommitted(plan.hosts, machines.memory_bytes, machines.disk_bytes)
    plan.refusals += _overcommitted_gpus(plan)
    plan.bandwidth = _bandwidth(plan)
    plan.assumptions += _assumptions(plan)
    _note_shorter_sequences(plan)
    _note_long_requests(plan)
    _note_what_is_slow(plan)
    return plan


def _most_on_a_node(plan: Plan, role: Role) -> int:
    """Return the most ranks that a group of a fleet has on one node; all of them if they could not be placed."""
    ranks = [rank.num_local for rank in plan.ranks if rank.role is role]
    return max(ranks, default=plan.spec.engine_config(role).world_size)


def _too_small_tiers(plan: Plan) -> Iterator[str]:
    for fleet in plan.fleets:
        if (tiers := plan.spec.fleets.present[fleet.role].kv_tiers) is not None:
            problems = find_too_small_tiers(tiers, fleet.fewest_tier_bytes, len(fleet.arenas))
            yield from (f"{fleet.role}: {problem}" for problem in problems)


def _hosts(plan: Plan) -> list[HostNeeds]:
    in_memory = {fleet.role: fleet.host_bytes for fleet in plan.fleets}
    needs = {role: needs_of_worker(plan.spec, role, in_memory.get(role, 0)) for role in plan.spec.fleets.present}
    return needs_of_nodes([(rank.node, needs[rank.role]) for rank in plan.ranks])


def _overcommitted_gpus(plan: Plan) -> Iterator[str]:
    """Explain for each node on which of its GPUs the engines take the most memory, if it is more than there is."""
    taken = {fleet.role: fleet.gpu_bytes for fleet in plan.fleets}
    by_gpu: Counter[tuple[int, int]] = Counter()
    for rank in plan.ranks:
        if rank.gpu is not None:
            by_gpu[rank.node, rank.gpu] += taken.get(rank.role, 0)
    total = plan.machines.gpu_memory_bytes
    for node in range(plan.num_nodes):
        num_bytes, gpu = max(((by_gpu[place], place[1]) for place in by_gpu if place[0] == node), default=(0, 0))
        if num_bytes > total:
            yield (
                f"node {node}: the engines on its GPU {gpu} take {num_bytes / GB:.1f} GB of {total / GB:.1f}: give "
                "those that share a GPU less KV memory"
            )


def _bandwidth(plan: Plan) -> Bandwidth | None:
    """Return the traffic of hand-offs; None if there are none."""
    fleets = {fleet.role: fleet for fleet in plan.fleets}
    if Role.PREFILL not in fleets or Role.DECODE not in fleets:
        return None
    spec, decode = plan.spec, fleets[Role.DECODE].config
    caches = engine_caches(read_model(spec, Role.DECODE)).layout
    request = handoff_bytes(caches, decode.tensor_parallel_size, plan.traffic.prompt_tokens)
    total = request * plan.traffic.requests_per_s
    readers, holders = (spec.num_workers_of(role) for role in (Role.DECODE, Role.PREFILL))
    return Bandwidth(request, total, total / holders, total / readers)


THROUGH_TCP = "KV blocks of GPUs go from machine to machine through TCP, at 1 GB/s or less: hand-offs will be avoided"


def _assumptions(plan: Plan) -> Iterator[str]:
    if any(fleet.device == "cuda" for fleet in plan.fleets):
        yield f"the driver takes {DRIVER_BYTES / GB:.1f} GB of each GPU, and no other process takes any"
    if any(fleet.takes_free_memory for fleet in plan.fleets):
        yield (
            f"{ENOUGH_FREE_BYTES / GB:.1f} GB of a node's memory are free when weights are loaded; with less, KV blocks"
            " of engines on a CPU get less"
        )


def _note_shorter_sequences(plan: Plan) -> None:
    plan.notes += [f"{fleet.role}: {fleet.shortened}" for fleet in plan.fleets if fleet.shortened is not None]


def _note_long_requests(plan: Plan) -> None:
    load = plan.traffic
    for fleet in plan.fleets:
        if load.prompt_tokens + load.output_tokens > fleet.max_model_len:
            plan.notes.append(
                f"{fleet.role}: requests of {load.prompt_tokens} + {load.output_tokens} tokens are longer than "
                f"max_model_len, {fleet.max_model_len}, and would be cut off"
            )


def _note_what_is_slow(plan: Plan) -> None:
    _note_spread_engines(plan)
    _note_shared_gpus(plan)
    nodes = {role: {rank.node for rank in plan.ranks if rank.role is role} for role in (Role.PREFILL, Role.DECODE)}
    on_gpus = any(fleet.role is Role.DECODE and fleet.device == "cuda" for fleet in plan.fleets)
    crosses_nodes = any(one != other for one in nodes[Role.PREFILL] for other in nodes[Role.DECODE])
    if on_gpus and crosses_nodes and plan.spec.transfer.transport == "ucx":
        plan.notes.append(
            f"transfer.transport ucx: the UCX of its package has no InfiniBand, so {THROUGH_TCP}; take nixl, or start "
            "Ray with RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true where the machines have a UCX of their own"
        )


def _note_shared_gpus(plan: Plan) -> None:
    reservations = Reservations(plan.spec, plan.machines.gpus_per_node)
    shares = {fleet.role: reservations.gpus_of(fleet.role) for fleet in plan.fleets}
    if any(fleet.device == "cuda" and 0 < shares[fleet.role] < 1 for fleet in plan.fleets):
        plan.notes.append(
            "engines that share a GPU take turns in using all of it, so answers are written more slowly while prompts "
            "are read: start nvidia-cuda-mps-control -d before Ray, and they run at the same time"
        )


def _note_spread_engines(plan: Plan) -> None:
    groups: dict[tuple[Role, int, int], set[int]] = {}
    for rank in plan.ranks:
        groups.setdefault((rank.role, rank.group, rank.dp_rank), set()).add(rank.node)
    straddling = sum(len(nodes) > 1 for nodes in groups.values())
    if straddling:
        plan.notes.append(
            f"the layers of {pluralize(straddling, 'engine')} are divided over several nodes, which is slow: choose a "
            f"tensor_parallel_size that divides {plan.machines.gpus_per_node}"
        )

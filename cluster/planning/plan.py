"""The plan of an application on given machines: placement, memory, KV blocks, bandwidth, refusals.

Everything follows from the application's arguments and the model's config.json. Only the memory that a step allocates
is an estimate, and is called so, because only a running engine can measure it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.cluster.contracts import Role
from baton.cluster.engines.launch import assign_ranks
from baton.cluster.pluralize import pluralize
from baton.cluster.spec import FleetSpec, Reservations
from baton.engine.config import EngineConfig, InvalidEngineConfig
from baton.engine.core.layout import BLOCK_SIZE, DTYPE_BYTES, GroupLayout
from baton.engine.hf_config.errors import ModelError
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.startup.arenas import arenas_of, divide_memory, draft_bytes, engine_caches, longest_sequence, needs_of
from baton.engine.startup.kv_size import check_room
from baton.engine.startup.step_sizes import StepSizes, step_sizes
from baton.engine.startup.weight_counts import check_weights_fit, usable_gpu_bytes, weight_bytes_of_rank
from baton.kv_transfer.tiers.division import divide_bytes, fewest_bytes

from .model_checks import read_model
from .sizing import (
    GB,
    HostNeeds,
    find_overcommitted,
    find_too_small_tiers,
    handoff_bytes,
    needs_of_nodes,
    needs_of_worker,
)

GPU_SHARE = "gpu_memory_utilization"  # the setting by which KV blocks get what weights and steps leave
CPU_KV_BYTES = 4 << 30  # at most, if no setting gives it
DRIVER_BYTES = 2 << 30  # of a GPU's memory, for its context, captured steps and libraries; measured on an H200


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
class Traffic:
    """The load that the application is to serve."""

    requests_per_s: float = 1.0
    prompt_tokens: int = 1024
    output_tokens: int = 256


@dataclass(frozen=True)
class RankPlan:
    """The placement of one worker."""

    role: Role
    group: int  # number within the fleet
    dp_rank: int
    tp_rank: int
    engine_rank: int  # rank of the engine that this worker belongs to, as gateways and clients use it
    node: int


@dataclass(frozen=True)
class ArenaPlan:
    """The blocks of one cache group in one rank."""

    group: GroupLayout  # this rank's part of it
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.group.blocks.block_bytes


@dataclass(frozen=True)
class FleetPlan:
    """The memory of each rank of a fleet, in bytes unless another unit is named."""

    role: Role
    config: EngineConfig
    steps: StepSizes
    device: str
    weights: int
    step: int  # estimated
    arenas: Sequence[ArenaPlan]  # of each cache group
    max_model_len: int  # tokens

    @property
    def num_blocks(self) -> int:
        """Return the blocks of all arenas."""
        return sum(arena.num_blocks for arena in self.arenas)

    @property
    def kv(self) -> int:
        return sum(arena.num_bytes for arena in self.arenas)

    def tier_slots(self, num_bytes: int) -> Sequence[int]:
        """Return for each cache group the number of blocks in a tier of this size."""
        return divide_bytes(num_bytes, *self._tier_sizes)

    @property
    def fewest_tier_bytes(self) -> int:
        """Return the size of a tier that holds one block of each cache group."""
        return fewest_bytes(*self._tier_sizes)

    @property
    def _tier_sizes(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the bytes of each arena, and of one block in each."""
        block_bytes = [arena.group.blocks.block_bytes for arena in self.arenas]
        return [arena.num_bytes for arena in self.arenas], block_bytes

    @property
    def host(self) -> int:
        """Return the bytes in the host's memory."""
        return self.weights + self.step + self.kv if self.device == "cpu" else 0

    def num_requests(self, traffic: Traffic) -> int:
        """Return how many requests one engine can run at once, limited by the blocks of each arena and by rows."""
        num_tokens = traffic.prompt_tokens + traffic.output_tokens
        by_arena = (needs_of(arena.group).requests_at_once(arena.num_blocks, num_tokens) for arena in self.arenas)
        return min(self.steps.max_num_seqs, *by_arena)


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

    @property
    def num_nodes(self) -> int:
        return max((rank.node for rank in self.ranks), default=-1) + 1


def make_plan(spec: FleetSpec, machines: Machines, traffic: Traffic) -> Plan:
    """Plan an application. If it cannot work, nothing is raised: `refusals` has the reasons."""
    plan = Plan(spec, machines, traffic)
    plan.refusals += _too_large_for_a_node(spec, machines)
    plan.ranks = [] if plan.refusals else list(_placement(spec, machines))
    if machines.nodes is not None and plan.num_nodes > machines.nodes:
        plan.refusals.append(
            f"{pluralize(plan.num_nodes, 'node')} needed, {machines.nodes} given: give more, or fewer or smaller groups"
        )
    for role in spec.fleets.present:
        try:
            plan.fleets.append(_fleet(spec, role, machines, plan.notes))
        except (ModelError, InvalidEngineConfig) as error:
            plan.refusals.append(f"{role}: {error}")
    plan.refusals += _too_small_tiers(plan)
    plan.hosts = _hosts(plan)
    plan.refusals += find_overcommitted(plan.hosts, machines.memory_bytes, machines.disk_bytes)
    plan.bandwidth = _bandwidth(plan)
    _note_long_requests(plan)
    _note_what_is_slow(plan)
    return plan


def _fleet(spec: FleetSpec, role: Role, machines: Machines, notes: list[str]) -> FleetPlan:
    config, model = spec.engine_config(role), read_model(spec, role)
    device = machines.device if config.device == "auto" else config.device
    has_fp8 = device == "cuda" and machines.has_fp8
    if device == "cuda":
        check_weights_fit(model, config, usable_gpu_bytes(config, machines.gpu_memory_bytes), has_fp8=has_fp8)
    weights = weight_bytes_of_rank(model, config, has_fp8=has_fp8)
    steps = step_sizes(config, model, machines.gpu_memory_bytes if device == "cuda" else None)
    step = _step_bytes(model, config, steps)
    step += draft_bytes(model, config.speculative_config, steps.max_num_seqs, config.tensor_parallel_size)
    caches = engine_caches(model).layout.of_rank(0, config.tensor_parallel_size)  # the ranks' parts are of equal size
    budget, setting = _kv_budget(spec, role, machines, device, weights + step)
    if config.num_gpu_blocks_override is not None:
        sizes = arenas_of(caches, config.num_gpu_blocks_override, steps.max_num_seqs, model.max_model_len)
        setting = "num_gpu_blocks_override"
    else:
        sizes = divide_memory(caches, max(0, budget), steps.max_num_seqs, model.max_model_len)
    longest = longest_sequence(caches, sizes)
    max_model_len = min(model.max_model_len, longest)
    if longest == 0 and setting != GPU_SHARE:
        raise InvalidEngineConfig(setting, "is too small for the KV blocks of a sequence of any length: raise it")
    if longest == 0:
        raise InvalidEngineConfig(
            setting,
            f"leaves no room for KV blocks: weights take {weights / GB:.1f} GB, a step some {step / GB:.1f} GB; raise "
            "tensor_parallel_size, lower max_num_batched_tokens, or use devices with more memory",
        )
    if max_model_len < model.max_model_len:
        what = f"for {max_model_len} tokens, a sequence may have {model.max_model_len}"
        blocks = pluralize(longest // BLOCK_SIZE, "block")
        if config.max_model_len is not None:
            raise InvalidEngineConfig(setting, f"{blocks} {what}")
        notes.append(f"{role}: {blocks} {what}: max_model_len becomes {max_model_len}")
    if device == "cuda":
        check_room(config, caches, sizes, machines.gpu_memory_bytes - DRIVER_BYTES - weights - step)
    arenas = [ArenaPlan(group, size) for group, size in zip(caches.groups, sizes, strict=True)]
    return FleetPlan(role, config, steps, device, weights, step, arenas, max_model_len)


def _kv_budget(spec: FleetSpec, role: Role, machines: Machines, device: str, taken: int) -> tuple[int, str]:
    """Return the bytes for KV blocks, and the name of the argument that changes them."""
    config = spec.engine_config(role)
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    if device == "cpu":
        return CPU_KV_BYTES, "kv_cache_memory_bytes"
    total = usable_gpu_bytes(config, machines.gpu_memory_bytes)
    return total - DRIVER_BYTES - taken, GPU_SHARE


def _step_bytes(model: ModelConfig, config: EngineConfig, steps: StepSizes) -> int:
    """Estimate the bytes that the largest step allocates, for the widest activations and for logits in float32."""
    ranks = config.tensor_parallel_size
    widths = [model.mlp_width(layer) for layer in range(model.num_layers)]
    widths += [model.num_heads * heads.key_dim for heads in model.head_shapes]
    if model.mamba is not None:
        widths.append(2 * model.mamba.width)
    width = 4 * model.hidden_size + 3 * max(widths) // ranks
    if model.layer_inputs is not None:
        width += 3 * model.num_layers * model.layer_inputs.width  # looked up, projected, added up
    if model.moe is not None:
        width += model.moe.top_k * (model.hidden_size + 3 * model.moe.intermediate_size)
    tokens = steps.max_num_batched_tokens * (config.data_parallel_size if config.enable_expert_parallel else 1)
    logits = steps.max_num_seqs * model.vocab_size * (DTYPE_BYTES[model.dtype] + 4)
    return tokens * width * DTYPE_BYTES[model.dtype] + logits


def _too_large_for_a_node(spec: FleetSpec, machines: Machines) -> Iterator[str]:
    reservations = Reservations(spec, machines.gpus_per_node)
    for role in spec.fleets.present:
        each = reservations.gpus_of(role)
        if each > machines.gpus_per_node:
            yield f"{role}: a worker needs {each:g} GPUs, a node has {machines.gpus_per_node}"


def _too_small_tiers(plan: Plan) -> Iterator[str]:
    for fleet in plan.fleets:
        if (tiers := plan.spec.fleets.present[fleet.role].kv_tiers) is not None:
            problems = find_too_small_tiers(tiers, fleet.fewest_tier_bytes, len(fleet.arenas))
            yield from (f"{fleet.role}: {problem}" for problem in problems)


def _placement(spec: FleetSpec, machines: Machines) -> Iterator[RankPlan]:
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
                yield RankPlan(role, group, dp_rank, tp_rank, first + dp_rank, nodes[rank.bundle])


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


def _hosts(plan: Plan) -> list[HostNeeds]:
    in_memory = {fleet.role: fleet.host for fleet in plan.fleets}
    needs = {role: needs_of_worker(plan.spec, role, in_memory.get(role, 0)) for role in plan.spec.fleets.present}
    return needs_of_nodes([(rank.node, needs[rank.role]) for rank in plan.ranks])


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
            "engines that share a GPU take turns in using all of it, so prompts are read half as fast while answers "
            "are written: start nvidia-cuda-mps-control -d before Ray, and they run at the same time"
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

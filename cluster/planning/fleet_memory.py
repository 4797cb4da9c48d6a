"""The memory of each rank of a fleet: weights, steps, KV blocks.

weights   counted from config.json
steps     estimated: only a running engine can measure them
KV        `size_kv_cache`, the rule of engines, given the memory that a start would find, as far as it is known:

          on a GPU   `DRIVER_BYTES`, the weights and nothing else are in use
          on a CPU   as much memory is free as the most blocks by default need (`ENOUGH_FREE_BYTES`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.cluster.contracts import Role
from baton.cluster.spec import FleetSpec
from baton.engine.config import EngineConfig
from baton.engine.core.layout import DTYPE_BYTES, GroupLayout
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.startup.arenas import draft_bytes, engine_caches, needs_of
from baton.engine.startup.kv_size import ENOUGH_FREE_BYTES, check_blocks_fit, size_kv_cache
from baton.engine.startup.memory import DRIVER_BYTES, CpuMemory, GpuMemory, usable_gpu_bytes
from baton.engine.startup.step_sizes import StepSizes, step_sizes
from baton.engine.startup.weight_counts import check_weights_fit, weight_bytes_of_rank
from baton.kv_transfer.tiers.division import divide_bytes, fewest_bytes

from .model_checks import read_model
from .placement import Machines


@dataclass(frozen=True)
class Traffic:
    """The load that the application is to serve."""

    requests_per_s: float = 1.0
    prompt_tokens: int = 1024
    output_tokens: int = 256


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
    """The memory of each rank of a fleet."""

    role: Role
    config: EngineConfig
    steps: StepSizes
    device: str
    weight_bytes: int
    step_bytes: int  # estimated
    arenas: Sequence[ArenaPlan]  # of each cache group
    max_model_len: int  # tokens
    shortened: str | None  # why `max_model_len` is less than the model's; None: it is not

    @property
    def takes_free_memory(self) -> bool:
        """True if KV blocks get a share of the memory that a start finds free, which a plan can only assume."""
        return self.device == "cpu" and self.config.kv_size_setting is None

    @property
    def num_blocks(self) -> int:
        """The blocks of all arenas."""
        return sum(arena.num_blocks for arena in self.arenas)

    @property
    def kv_bytes(self) -> int:
        return sum(arena.num_bytes for arena in self.arenas)

    def tier_slots(self, num_bytes: int) -> Sequence[int]:
        """Return for each cache group the number of blocks in a tier of this size."""
        return divide_bytes(num_bytes, *self._tier_sizes)

    @property
    def fewest_tier_bytes(self) -> int:
        """The size of a tier that holds one block of each cache group."""
        return fewest_bytes(*self._tier_sizes)

    @property
    def _tier_sizes(self) -> tuple[Sequence[int], Sequence[int]]:
        """The bytes of each arena, and of one block in each."""
        block_bytes = [arena.group.blocks.block_bytes for arena in self.arenas]
        return [arena.num_bytes for arena in self.arenas], block_bytes

    @property
    def gpu_bytes(self) -> int:
        """The bytes of a GPU that one rank takes."""
        on_gpu = self.device == "cuda"
        return DRIVER_BYTES + self.weight_bytes + self.step_bytes + self.kv_bytes if on_gpu else 0

    @property
    def host_bytes(self) -> int:
        """The bytes in the host's memory."""
        return self.weight_bytes + self.step_bytes + self.kv_bytes if self.device == "cpu" else 0

    def num_requests(self, traffic: Traffic) -> int:
        """Return how many requests one engine can run at once, limited by the blocks of each arena and by rows."""
        num_tokens = traffic.prompt_tokens + traffic.output_tokens
        by_arena = (needs_of(arena.group).requests_at_once(arena.num_blocks, num_tokens) for arena in self.arenas)
        return min(self.steps.max_num_seqs, *by_arena)


def plan_fleet(spec: FleetSpec, role: Role, machines: Machines, num_local: int) -> FleetPlan:
    """Plan the memory of a fleet whose groups have up to `num_local` ranks on a node.

    Raises `ModelError` or `InvalidEngineConfig` where its engines would.
    """
    config, model = spec.engine_config(role), read_model(spec, role)
    device = machines.device if config.device == "auto" else config.device
    on_gpu, total = device == "cuda", machines.gpu_memory_bytes
    has_fp8 = on_gpu and machines.has_fp8
    if on_gpu:
        check_weights_fit(model, config, usable_gpu_bytes(config, total), has_fp8=has_fp8)
    weights = weight_bytes_of_rank(model, config, has_fp8=has_fp8)
    steps = step_sizes(config, model, total if on_gpu else None)
    drafts = draft_bytes(model, config.speculative_config, steps.max_num_seqs, config.tensor_parallel_size)
    step = _step_bytes(model, config, steps) + drafts
    memory: CpuMemory | GpuMemory
    if on_gpu:
        memory = GpuMemory(total_bytes=total, used_bytes=DRIVER_BYTES + weights, step_bytes=step)
    else:
        memory = CpuMemory(free_bytes=ENOUGH_FREE_BYTES, num_local=num_local, draft_bytes=drafts)
    caches = engine_caches(model).on_each_rank(config.tensor_parallel_size)
    size = size_kv_cache(config, memory, caches, max_num_seqs=steps.max_num_seqs, context_len=model.max_model_len)
    if on_gpu:
        check_blocks_fit(config, caches, size, memory.left_bytes)
    arenas = [ArenaPlan(group, count) for group, count in zip(caches.groups, size.blocks_by_group, strict=True)]
    return FleetPlan(role, config, steps, device, weights, step, arenas, size.max_model_len, size.shortened)


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

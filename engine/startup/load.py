"""Kernels, weights, KV blocks, runner: the order in which a rank loads, on any device. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.kernels.compiler import Compiler
from baton.kernels.fp8 import has_gpu_kernels

from ..config import EngineConfig
from ..core.config import CacheGroupConfig
from ..core.engine import EngineCoreConfig
from ..core.layout import CHECKPOINT_TOKENS, CacheKind
from ..core.messages import ExpertReview
from ..core.regions import CacheRegion
from ..core.step import Runner
from ..hf_config.model_config import ModelConfig
from ..parallel.rank_group import RankGroup
from ..worker.expert_balance import ExpertBalancer, ReviewingRunner
from .arenas import engine_caches
from .device import DeviceContext, DeviceStartup
from .kv_cache import allocate_arenas, available_memory_bytes, region_of
from .phases import Phases
from .step_sizes import StepSizes, step_sizes
from .weight_counts import check_weights_fit, usable_gpu_bytes

_CLOSE_S = 5.0


@dataclass(frozen=True)
class LoadedMember:
    """A rank whose weights are loaded and whose KV blocks are allocated."""

    membership: RankGroup
    model_config: ModelConfig
    core_config: EngineCoreConfig
    steps: StepSizes
    region: CacheRegion
    device_type: str
    make_runner: Callable[[], Runner]
    late_compilations: Callable[[], int]
    expert_review: Callable[[], ExpertReview] | None  # None: no experts are spread over ranks
    release: Callable[[], None]

    def close(self) -> None:
        """Leave the group. Captured graphs, which refer to it and may delay its end, are released in between."""
        self.membership.close()
        self.release()
        self.membership.groups.wait_closed(_CLOSE_S)


def load_member(
    config: EngineConfig,
    model_config: ModelConfig,
    membership: RankGroup,
    context: DeviceContext,
    compiler: Compiler | None,
    phases: Phases,
) -> LoadedMember:
    """Load this rank's part of the model and allocate its KV blocks.

    All ranks of the group call it at the same time. They agree on the smallest number of blocks that any of them has
    memory for.
    """
    _check_weights_fit(config, model_config, context)
    caches, member, widest = engine_caches(model_config).layout, context.member, context.groups.widest
    own_caches = caches.of_rank(member.tp_rank, member.tensor_parallel_size)
    steps = _step_sizes(config, model_config, context)
    with phases("kernels"):
        startup = _startup_on(config, steps, context, phases, compiler)
        startup.prepare_kernels(model_config, own_caches)
    with phases("weights"):
        model = startup.load_weights(model_config)
    with phases("kv_cache"):
        longest, fitting = startup.size_kv_cache(model, model_config, own_caches)
        max_model_len, *sizes = widest.all_min([longest, *fitting])
        arenas = allocate_arenas(startup.allocate, own_caches, sizes)
    depth = config.depth_on(startup.device_type)
    core_config = _core_config(config, steps, model_config, max_model_len, sizes, depth)
    balancer = ExpertBalancer.of(model, context.groups, moves=config.enable_eplb)

    def make_runner() -> Runner:
        runner = startup.make_runner(model, arenas, model_config, core_config)
        widest.barrier()  # no rank serves before all can
        return runner if balancer is None else ReviewingRunner(runner, balancer, startup.in_order)

    return LoadedMember(
        membership=membership,
        model_config=model_config,
        core_config=core_config,
        steps=steps,
        region=region_of(arenas, caches, member.tp_rank, member.tensor_parallel_size),
        device_type=context.device.type,
        make_runner=make_runner,
        late_compilations=startup.late_compilations,
        expert_review=None if balancer is None else lambda: balancer.last,
        release=startup.release,
    )


def _check_weights_fit(config: EngineConfig, model_config: ModelConfig, context: DeviceContext) -> None:
    """Raise `InvalidEngineConfig` if this rank's weights exceed its share of the device's or the machine's memory."""
    if context.device.type == "cpu":
        memory = available_memory_bytes() // context.member.num_local
    else:
        memory = usable_gpu_bytes(config, torch.cuda.get_device_properties(context.device).total_memory)
    check_weights_fit(model_config, config, memory, has_fp8=has_gpu_kernels(context.device))


def _step_sizes(config: EngineConfig, model_config: ModelConfig, context: DeviceContext) -> StepSizes:
    """Return the sizes of steps on which all ranks of the group agree: the smallest that any of them can have."""
    memory = None if context.device.type == "cpu" else torch.cuda.get_device_properties(context.device).total_memory
    sizes = step_sizes(config, model_config, memory)
    return StepSizes(*context.groups.widest.all_min(sizes))


def _startup_on(
    config: EngineConfig, steps: StepSizes, context: DeviceContext, phases: Phases, compiler: Compiler | None
) -> DeviceStartup:
    """Return the start-up of the context's kind of device. `compiler` compiles a GPU's kernels."""
    if context.device.type == "cpu":
        from .cpu import CpuStartup

        return CpuStartup(config, steps, context)
    from .cuda import CudaStartup

    return CudaStartup(config, steps, context, phases, compiler)


def _core_config(
    config: EngineConfig,
    steps: StepSizes,
    model_config: ModelConfig,
    max_model_len: int,
    arenas: list[int],
    depth: int,
) -> EngineCoreConfig:
    groups = [
        CacheGroupConfig(
            num_blocks=num_blocks,
            window=group.window,
            checkpoint_tokens=CHECKPOINT_TOKENS if group.kind is CacheKind.STATE else None,
        )
        for group, num_blocks in zip(engine_caches(model_config).layout.groups, arenas, strict=True)
    ]
    return EngineCoreConfig(
        num_blocks=sum(arenas),
        cache_groups=groups,
        block_size=config.block_size,
        max_num_seqs=steps.max_num_seqs,
        max_num_batched_tokens=steps.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        eos_token_ids=list(model_config.eos_token_ids),
        vocab_size=model_config.vocab_size,
        depth=depth,
        speculation=config.speculative_config,
    )

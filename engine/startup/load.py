"""Kernels, weights, KV blocks, runner: the order in which a rank loads, on any device. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from baton.kernels.compiler import Compiler
from baton.kernels.fp8 import has_gpu_kernels

from ..core.config import CacheGroupConfig, EngineCoreConfig
from ..core.layout import CHECKPOINT_TOKENS, CacheKind
from ..core.messages import EngineStats
from ..core.regions import CacheRegion
from ..core.step import Runner
from ..core.yielding import Yielding
from ..hf_config.model_config import ModelConfig
from ..parallel.rank_group import RankGroup
from ..worker.expert_balance import ExpertBalancer, ReviewingRunner
from .device import DeviceStartup, RankContext
from .device_board import board_of
from .kv_cache import allocate_arenas, region_of
from .kv_size import KVSize, check_blocks_fit, size_kv_cache
from .memory import CpuMemory, GpuMemory, available_memory_bytes, usable_gpu_bytes
from .phases import Phases
from .step_sizes import StepSizes, step_sizes
from .weight_counts import check_weights_fit

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0


@dataclass(frozen=True)
class LoadedMember:
    """A rank whose weights are loaded and whose KV blocks are allocated."""

    membership: RankGroup
    model_config: ModelConfig
    core_config: EngineCoreConfig
    region: CacheRegion
    device_type: str
    yielding: Yielding | None
    make_runner: Callable[[], Runner]
    add_runner_stats: Callable[[EngineStats], EngineStats]
    release: Callable[[], None]

    def close(self) -> None:
        """Leave the group. Captured graphs, which refer to it and may delay its end, are released in between."""
        self.membership.close()
        self.release()
        if self.yielding is not None:
            self.yielding.close()
        self.membership.groups.wait_closed(_CLOSE_S)


def load_member(context: RankContext, membership: RankGroup, compiler: Compiler | None, phases: Phases) -> LoadedMember:
    """Load this rank's part of the model and allocate its KV blocks.

    All ranks of the group call it at the same time. They agree on the smallest number of blocks that any of them has
    memory for.
    """
    _check_weights_fit(context)
    config, member, widest = context.config, context.member, context.groups.widest
    steps = _step_sizes(context)
    with phases("kernels"):
        startup = _startup_on(context, steps, phases, compiler)
        startup.prepare_kernels()
    with phases("weights"):
        model = startup.load_weights()
    with phases("kv_cache"):
        fitting = _size_kv_cache(context, steps, startup.measure_memory(model))
        max_model_len, *blocks_by_group = widest.all_min([fitting.max_model_len, *fitting.blocks_by_group])
        arenas = allocate_arenas(startup.allocate, context.own_caches, blocks_by_group)
    balancer = ExpertBalancer.of(model, context.groups, moves=config.enable_eplb)

    def make_runner() -> Runner:
        runner = startup.make_runner(model, arenas, max_model_len)
        widest.barrier()  # no rank serves before all can
        return runner if balancer is None else ReviewingRunner(runner, balancer, startup.in_order)

    def add_runner_stats(stats: EngineStats) -> EngineStats:
        experts = None if balancer is None else balancer.last
        return msgspec.structs.replace(stats, num_late_compilations=startup.late_compilations(), experts=experts)

    return LoadedMember(
        membership=membership,
        model_config=context.model_config,
        core_config=_core_config(context, steps, max_model_len, blocks_by_group),
        region=region_of(arenas, context.caches.layout, member.tp_rank, member.tensor_parallel_size),
        device_type=context.device.type,
        yielding=_yielding(context),
        make_runner=make_runner,
        add_runner_stats=add_runner_stats,
        release=startup.release,
    )


def _yielding(context: RankContext) -> Yielding | None:
    """Return when steps yield to other engines on the GPU of this rank; None: never. Ranks in lockstep never do."""
    uuid, interval_s = context.gpu_uuid, context.config.shared_gpu_decode_interval_ms / 1e3
    if uuid is None or not interval_s or context.member.data_parallel_size > 1 or context.member.tp_rank > 0:
        return None
    board = board_of(uuid)
    return None if board is None else Yielding(board, interval_s)


def _check_weights_fit(context: RankContext) -> None:
    """Raise `InvalidEngineConfig` if this rank's weights exceed its share of the device's or the machine's memory."""
    if (total := context.gpu_memory_bytes) is None:
        memory = available_memory_bytes() // context.member.num_local
    else:
        memory = usable_gpu_bytes(context.config, total)
    check_weights_fit(context.model_config, context.config, memory, has_fp8=has_gpu_kernels(context.device))


def _step_sizes(context: RankContext) -> StepSizes:
    """Return the sizes of steps on which all ranks of the group agree: the smallest that any of them can have."""
    sizes = step_sizes(context.config, context.model_config, context.gpu_memory_bytes)
    return StepSizes(*context.groups.widest.all_min(sizes))


def _size_kv_cache(context: RankContext, steps: StepSizes, memory: CpuMemory | GpuMemory) -> KVSize:
    """Return the blocks that this rank has memory for. Raises `InvalidEngineConfig`."""
    config, caches, context_len = context.config, context.own_caches, context.model_config.max_model_len
    size = size_kv_cache(config, memory, caches, max_num_seqs=steps.max_num_seqs, context_len=context_len)
    check_blocks_fit(config, caches, size, memory.left_bytes)
    if size.shortened is not None:
        logger.warning("%s", size.shortened)
    return size


def _startup_on(context: RankContext, steps: StepSizes, phases: Phases, compiler: Compiler | None) -> DeviceStartup:
    """Return the start-up of the context's kind of device. `compiler` compiles a GPU's kernels."""
    if context.device.type == "cpu":
        from .cpu import CpuStartup

        return CpuStartup(context, steps)
    from .cuda import CudaStartup

    return CudaStartup(context, steps, phases, compiler)


def _core_config(
    context: RankContext, steps: StepSizes, max_model_len: int, blocks_by_group: Sequence[int]
) -> EngineCoreConfig:
    config, model_config = context.config, context.model_config
    groups = [
        CacheGroupConfig(
            num_blocks=num_blocks,
            window=group.window,
            checkpoint_tokens=CHECKPOINT_TOKENS if group.kind is CacheKind.STATE else None,
        )
        for group, num_blocks in zip(context.caches.layout.groups, blocks_by_group, strict=True)
    ]
    return EngineCoreConfig(
        num_blocks=sum(blocks_by_group),
        cache_groups=groups,
        block_size=config.block_size,
        max_num_seqs=steps.max_num_seqs,
        max_num_batched_tokens=steps.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        eos_token_ids=list(model_config.eos_token_ids),
        vocab_size=model_config.vocab_size,
        depth=config.depth_on(context.device.type),
        speculation=config.speculative_config,
    )

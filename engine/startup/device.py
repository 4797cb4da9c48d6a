"""The device of this process, and the interface of start-up on one kind of device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from ..config import EngineConfig, InvalidEngineConfig
from ..core.layout import CacheLayout
from ..core.step import Runner
from ..hf_config.model_config import ModelConfig
from ..layers.decoder import CausalLM
from ..layers.eagle3 import Eagle3Head
from ..models import load_eagle3, load_model, stub_eagle3, stub_model
from ..parallel.groups import ParallelGroups
from ..parallel.member import Member
from ..weights import Progress, loading_bar
from ..worker.backends import DraftModel
from ..worker.shapes import StepLimits
from ..worker.tables import CacheArenas
from .arenas import EngineCaches, engine_caches
from .kv_cache import allocate_draft_inputs
from .memory import CpuMemory, GpuMemory
from .step_sizes import StepSizes


@dataclass(frozen=True)
class RankContext:
    """The arguments, model config, device and groups with which a rank is started."""

    config: EngineConfig
    model_config: ModelConfig
    device: torch.device
    member: Member
    groups: ParallelGroups

    @cached_property
    def caches(self) -> EngineCaches:
        """The cache groups of the model and its draft model, not divided over ranks."""
        return engine_caches(self.model_config)

    @cached_property
    def own_caches(self) -> CacheLayout:
        """This rank's part of the cache groups."""
        return self.caches.layout.of_rank(self.member.tp_rank, self.member.tensor_parallel_size)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The whole memory of this rank's GPU; None on a CPU."""
        if self.device.type == "cpu":
            return None
        total: int = torch.cuda.get_device_properties(self.device).total_memory
        return total

    @property
    def gpu_uuid(self) -> str | None:
        """The name of this rank's GPU in all processes; None on a CPU."""
        return None if self.device.type == "cpu" else str(torch.cuda.get_device_properties(self.device).uuid)

    def cache_arenas(
        self, tensors: Sequence[torch.Tensor], allocate: Callable[[int], torch.Tensor], limits: StepLimits
    ) -> CacheArenas:
        """Return a runner's arenas: the blocks of each cache group in `tensors`, and memory for inputs of drafts."""
        rank, size = self.member.tp_rank, self.member.tensor_parallel_size
        draft_inputs = allocate_draft_inputs(allocate, self.model_config, limits, rank, size)
        return CacheArenas(tensors, self.caches.of_model, draft_inputs)

    def share_cores(self, most: int | None = None) -> None:
        """Set the number of threads of a CPU op to this rank's share of the process's cores, at most `most`.

        OMP_NUM_THREADS takes precedence.
        """
        if "OMP_NUM_THREADS" not in os.environ:
            share = max(1, len(os.sched_getaffinity(0)) // self.member.num_local)
            torch.set_num_threads(share if most is None else min(most, share))


def device_for(config: EngineConfig, member: Member) -> torch.device:
    """Return the device that the arguments name; "auto" is a GPU if there is one. Raises `InvalidEngineConfig`."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidEngineConfig("device", "is 'cuda', but torch finds no CUDA device here: give 'cpu' or 'auto'")
    index = torch.cuda.current_device() if member.device_index is None else member.device_index
    if index >= torch.cuda.device_count():
        raise InvalidEngineConfig("device", f"rank {member.rank} needs GPU {index}, found {torch.cuda.device_count()}")
    return torch.device("cuda", index)


class DeviceStartup(Protocol):
    """Start-up on one kind of device. `load_member` calls the methods in this order."""

    def prepare_kernels(self) -> None:
        """Prepare what does not need the weights."""
        ...

    def load_weights(self) -> CausalLM: ...

    def measure_memory(self, model: CausalLM) -> CpuMemory | GpuMemory:
        """Return the device's memory, now that the weights are loaded, and what steps take of it."""
        ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory for arenas: uint8 [num_bytes]."""
        ...

    def make_runner(self, model: CausalLM, arenas: Sequence[torch.Tensor], max_model_len: int) -> Runner:
        """Return a runner that is warmed up: no request has to wait for compilation or for first use of memory.

        `arenas`: the blocks of each cache group.
        """
        ...

    def in_order(self) -> AbstractContextManager[object]:
        """Return a context in which work goes to the device in the order of the steps launched before and after it."""
        ...

    def late_compilations(self) -> int:
        """Return the number of kernels that were compiled after the runner was ready."""
        ...

    def release(self) -> None:
        """Release captured graphs. No step may be launched afterwards."""
        ...


def load_models(context: RankContext) -> tuple[CausalLM, DraftModel | None]:
    """Load the rank's part of the model, and of its draft model or head if it has one. Shows the progress."""
    with loading_bar() as progress:
        model = load_model(context.model_config, device=context.device, progress=progress, groups=context.groups)
        return model, load_draft_model(context.model_config, model, progress=progress, groups=context.groups)


def load_draft_model(
    model_config: ModelConfig, model: CausalLM, *, progress: Progress, groups: ParallelGroups
) -> DraftModel | None:
    """Load the draft model or head of a config, on the device of its `model`; None if it has none."""
    device, groups = model.device, groups.of_draft_model
    return _draft_model(
        model_config,
        lambda config: load_model(config, device=device, progress=progress, groups=groups),
        lambda config: load_eagle3(config, model, device=device, progress=progress, groups=groups),
    )


def stub_draft_model(model_config: ModelConfig, model: CausalLM, groups: ParallelGroups) -> DraftModel | None:
    """Return a stub that launches the same kernels as the result of `load_draft_model`, for a stub of the model."""
    device, groups = model.device, groups.of_draft_model
    return _draft_model(
        model_config,
        lambda config: stub_model(config, device=device, groups=groups),
        lambda config: stub_eagle3(config, model, device=device, groups=groups),
    )


def _draft_model(
    model_config: ModelConfig,
    make_model: Callable[[ModelConfig], CausalLM],
    make_head: Callable[[ModelConfig], Eagle3Head],
) -> DraftModel | None:
    config = model_config.draft_model
    if config is None:
        return None
    caches = engine_caches(model_config).of_draft_model
    if config.eagle3 is not None:
        return DraftModel(caches, head=make_head(config))
    return DraftModel(caches, model=make_model(config))


def step_limits(config: EngineConfig, steps: StepSizes, max_model_len: int) -> StepLimits:
    """Return the bounds of a runner's steps."""
    speculation = config.speculative_config
    max_drafts = 0 if speculation is None else speculation.num_speculative_tokens
    return StepLimits(
        steps.max_num_seqs,
        steps.max_num_batched_tokens,
        max_model_len,
        max_drafts,
        guesses_on_device=config.guesses_on_device,
    )

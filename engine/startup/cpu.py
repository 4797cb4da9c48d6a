"""Start-up on a CPU. Implements `DeviceStartup`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from baton.kernels import native

from ..config import EngineConfig
from ..core.engine import EngineCoreConfig
from ..core.layout import CacheLayout
from ..core.step import Runner
from ..hf_config.model_config import ModelConfig
from ..layers.decoder import CausalLM
from ..parallel.groups import ALL_ALONE
from ..worker.backends import DraftModel
from ..worker.backends.cpu import CpuBackend
from ..worker.runner import ModelRunner
from ..worker.shapes import CpuShapes
from ..worker.tables import CacheArenas
from ..worker.warmup import warm_up
from .arenas import draft_bytes, engine_caches
from .device import DeviceContext, load_models, step_limits
from .kv_cache import allocate_drafts, allocate_on_cpu, cpu_budget, size_kv_cache
from .step_sizes import StepSizes

logger = logging.getLogger(__name__)


class CpuStartup:
    device_type = "cpu"

    def __init__(self, config: EngineConfig, steps: StepSizes, context: DeviceContext) -> None:
        self._config = config
        self._steps = steps
        self._context = context
        self._draft_model: DraftModel | None = None

    def prepare_kernels(self, model_config: ModelConfig, caches: CacheLayout) -> None:
        """Set the number of threads, and compile the C++ kernels if this machine has not done so yet."""
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        else:
            self._context.share_cores()
        try:
            native.prepare()
        except native.NativeBuildError as error:
            logger.warning("the CPU kernels cannot be compiled, so the engine is many times slower: %s", error)

    def load_weights(self, model_config: ModelConfig) -> CausalLM:
        model, self._draft_model = load_models(model_config, self._context.device, self._context.groups)
        return model

    def size_kv_cache(
        self, model: CausalLM, model_config: ModelConfig, caches: CacheLayout
    ) -> tuple[int, Sequence[int]]:
        member, seqs = self._context.member, self._steps.max_num_seqs
        drafts = draft_bytes(model_config, self._config.speculative_config, seqs, member.tensor_parallel_size)
        budget = functools.partial(cpu_budget, member.num_local, drafts)
        return size_kv_cache(self._config, seqs, model_config.max_model_len, caches, budget)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return allocate_on_cpu(num_bytes)

    def make_runner(
        self, model: CausalLM, arenas: Sequence[torch.Tensor], model_config: ModelConfig, core_config: EngineCoreConfig
    ) -> Runner:
        limits = step_limits(self._config, self._steps, core_config.max_model_len)
        member = self._context.member
        draft_inputs = allocate_drafts(self.allocate, model_config, limits, member.tp_rank, member.tensor_parallel_size)
        runner = ModelRunner(
            model,
            CacheArenas(arenas, engine_caches(model_config).of_model, draft_inputs),
            CpuBackend(CpuShapes(limits)),
            limits,
            core_config.vocab_size,
            self._draft_model,
        )
        if self._context.groups == ALL_ALONE:  # no recording if ranks wait for each other within a step
            runner.capture()
        warm_up(runner, limits, min(group.num_blocks for group in core_config.groups), len(arenas))
        return runner

    def in_order(self) -> AbstractContextManager[object]:
        return nullcontext()

    def late_compilations(self) -> int:
        return 0

    def release(self) -> None:
        pass

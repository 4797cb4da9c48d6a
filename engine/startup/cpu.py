"""Start-up on a CPU. Implements `DeviceStartup`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from baton.kernels import native

from ..core.step import Runner
from ..layers.decoder import CausalLM
from ..parallel.groups import ALL_ALONE
from ..worker.backends import DraftModel
from ..worker.backends.cpu import CpuBackend
from ..worker.backends.cpu_shapes import CpuShapes
from ..worker.runner import ModelRunner
from ..worker.warmup import warm_up
from .arenas import draft_bytes
from .device import RankContext, load_models, step_limits
from .kv_cache import allocate_on_cpu
from .memory import CpuMemory, available_memory_bytes
from .step_sizes import StepSizes

logger = logging.getLogger(__name__)


class CpuStartup:
    def __init__(self, context: RankContext, steps: StepSizes) -> None:
        self._context = context
        self._steps = steps
        self._draft_model: DraftModel | None = None

    def prepare_kernels(self) -> None:
        """Set the number of threads, and compile the C++ kernels if this machine has not done so yet."""
        if (num_threads := self._context.config.num_threads) is not None:
            torch.set_num_threads(num_threads)
        else:
            self._context.share_cores()
        try:
            native.prepare()
        except native.NativeBuildError as error:
            logger.warning("the CPU kernels cannot be compiled, so the engine is many times slower: %s", error)

    def load_weights(self) -> CausalLM:
        model, self._draft_model = load_models(self._context)
        return model

    def measure_memory(self, model: CausalLM) -> CpuMemory:
        context, seqs = self._context, self._steps.max_num_seqs
        speculation, ranks = context.config.speculative_config, context.member.tensor_parallel_size
        return CpuMemory(
            free_bytes=available_memory_bytes(),
            num_local=context.member.num_local,
            draft_bytes=draft_bytes(context.model_config, speculation, seqs, ranks),
        )

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return allocate_on_cpu(num_bytes)

    def make_runner(self, model: CausalLM, arenas: Sequence[torch.Tensor], max_model_len: int) -> Runner:
        context = self._context
        limits = step_limits(context.config, self._steps, max_model_len)
        cache_arenas, backend = context.cache_arenas(arenas, self.allocate, limits), CpuBackend(CpuShapes(limits))
        runner = ModelRunner(model, cache_arenas, backend, limits, context.model_config.vocab_size, self._draft_model)
        if context.groups == ALL_ALONE:  # no recording if ranks wait for each other within a step
            runner.capture()
        warm_up(runner)
        return runner

    def in_order(self) -> AbstractContextManager[object]:
        return nullcontext()

    def late_compilations(self) -> int:
        return 0

    def release(self) -> None:
        pass

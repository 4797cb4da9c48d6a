"""The parts of an engine's start-up that need torch, for `engine.build` to order: one assembly a kind of device."""

from __future__ import annotations

import logging
import os
from typing import Protocol

import torch

from baton.kernels import native
from baton.kernels.compiler import Compiler

from ..config import EngineConfig, InvalidEngineConfig
from ..core.engine import EngineCoreConfig
from ..core.layout import KVLayout
from ..core.step import Runner
from ..model_config import ModelConfig
from ..models import load_model
from ..weights import loading_bar
from .kv_cache import allocate_kv, cpu_budget, region_of, size_kv_cache
from .runner import Model, ModelRunner
from .warmup import warm_up

__all__ = ["Assembly", "assembly_for", "region_of"]

logger = logging.getLogger(__name__)


class Assembly(Protocol):
    """Start-up on one kind of device, in the order of the methods."""

    device: str  # "cpu" or "cuda"

    def prepare_kernels(self) -> None:
        """What can be done before the model is known."""
        ...

    def load_weights(self, model_config: ModelConfig) -> Model: ...

    def size_kv_cache(self, model: Model, model_config: ModelConfig, layout: KVLayout) -> tuple[int, int]:
        """Tokens of the longest sequence, and how many blocks there are. Raises `InvalidEngineConfig`."""
        ...

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        """A tensor of `layout.shape`."""
        ...

    def make_runner(
        self, model: Model, kv: torch.Tensor, model_config: ModelConfig, core_config: EngineCoreConfig
    ) -> Runner:
        """A runner that is ready: nothing is compiled or first touched by a request."""
        ...

    def late_compilations(self) -> int:
        """How many kernels were compiled all the same."""
        ...


class CpuAssembly:
    device = "cpu"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def prepare_kernels(self) -> None:
        """Sets how many threads an op uses (every core of this process, unless told otherwise); builds what lacks."""
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        try:
            native.prepare()
        except native.NativeBuildError as error:
            logger.warning("no compiled kernels, so an engine many times slower: %s", error)

    def load_weights(self, model_config: ModelConfig) -> Model:
        with loading_bar() as progress:
            return load_model(model_config, progress=progress)

    def size_kv_cache(self, model: Model, model_config: ModelConfig, layout: KVLayout) -> tuple[int, int]:
        return size_kv_cache(self._config, model_config.max_model_len, layout, cpu_budget)

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        return allocate_kv(layout, num_blocks)

    def make_runner(
        self, model: Model, kv: torch.Tensor, model_config: ModelConfig, core_config: EngineCoreConfig
    ) -> Runner:
        runner = ModelRunner(
            model,
            kv,
            vocab_size=core_config.vocab_size,
            max_num_seqs=core_config.max_num_seqs,
            max_model_len=core_config.max_model_len,
        )
        warm_up(runner, num_blocks=core_config.num_blocks, max_model_len=core_config.max_model_len)
        return runner

    def late_compilations(self) -> int:
        return 0


def assembly_for(config: EngineConfig, compiler: Compiler | None = None) -> Assembly:
    """That of the device that the arguments name; "auto" is a GPU where there is one.

    `compiler` is for a GPU's kernels. Raises `InvalidEngineConfig`.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return CpuAssembly(config)
    if not torch.cuda.is_available():
        raise InvalidEngineConfig("device", "is 'cuda', but torch finds no CUDA device here: give 'cpu' or 'auto'")
    from .cuda.assembly import CudaAssembly

    return CudaAssembly(config, compiler)

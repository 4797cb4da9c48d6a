"""The parts of an engine's start-up that need torch, for `engine.loading` to order: one assembly a kind of device."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from baton.kernels import native
from baton.kernels.compiler import Compiler

from ..config import EngineConfig
from ..core.engine import EngineCoreConfig
from ..core.layout import KVLayout
from ..core.step import Runner
from ..hf_config.model_config import ModelConfig
from ..layers.decoder import CausalLM
from ..models import load_model
from ..parallel.groups import ALL_ALONE
from ..phases import Phases
from ..weights import loading_bar
from .kv_cache import allocate_kv, cpu_budget, region_of, size_kv_cache
from .runner import Model, ModelRunner
from .warmup import warm_up
from .workplace import Workplace

__all__ = ["Assembly", "assembly_for", "region_of"]

logger = logging.getLogger(__name__)


class Assembly(Protocol):
    """Start-up on one kind of device, in the order of the methods."""

    device: str  # "cpu" or "cuda"

    def prepare_kernels(self, model_config: ModelConfig, layout: KVLayout) -> None:
        """What can be done before the weights are there."""
        ...

    def load_weights(self, model_config: ModelConfig) -> CausalLM: ...

    def size_kv_cache(self, model: CausalLM, model_config: ModelConfig, layout: KVLayout) -> tuple[int, int]:
        """Tokens of the longest sequence, and how many blocks there are. `layout` is of what lies on this rank.

        Raises `InvalidEngineConfig`.
        """
        ...

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        """A tensor of `layout.shape`."""
        ...

    def make_runner(
        self, model: Model, kv: torch.Tensor, model_config: ModelConfig, core_config: EngineCoreConfig
    ) -> Runner:
        """A runner that is ready: nothing is compiled or first touched by a request."""
        ...

    def in_order(self) -> AbstractContextManager[object]:
        """Within, what is given to the device is done between the step before and the one after."""
        ...

    def late_compilations(self) -> int:
        """How many kernels were compiled all the same."""
        ...

    def release(self) -> None:
        """Gives up what the runner needs beside memory; it launches nothing any more."""
        ...


class CpuAssembly:
    device = "cpu"

    def __init__(self, config: EngineConfig, place: Workplace) -> None:
        self._config = config
        self._place = place

    def prepare_kernels(self, model_config: ModelConfig, layout: KVLayout) -> None:
        """Sets how many threads an op uses, and builds what lacks.

        Unless told otherwise, the members of a group on one machine share all cores of this process.
        """
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        else:
            self._place.share_cores()
        try:
            native.prepare()
        except native.NativeBuildError as error:
            logger.warning("no compiled kernels, so an engine many times slower: %s", error)

    def load_weights(self, model_config: ModelConfig) -> CausalLM:
        with loading_bar() as progress:
            return load_model(model_config, progress=progress, groups=self._place.groups)

    def size_kv_cache(self, model: CausalLM, model_config: ModelConfig, layout: KVLayout) -> tuple[int, int]:
        budget = functools.partial(cpu_budget, self._place.member.num_local)
        return size_kv_cache(self._config, model_config.max_model_len, layout, budget)

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
            tapes=self._place.groups == ALL_ALONE,
        )
        warm_up(runner, num_blocks=core_config.num_blocks, max_model_len=core_config.max_model_len)
        return runner

    def in_order(self) -> AbstractContextManager[object]:
        return nullcontext()

    def late_compilations(self) -> int:
        return 0

    def release(self) -> None:
        pass


def assembly_for(config: EngineConfig, place: Workplace, phases: Phases, compiler: Compiler | None = None) -> Assembly:
    """That of the place's device. `phases` counts how long its parts take; `compiler` is for a GPU's kernels."""
    if place.device.type == "cpu":
        return CpuAssembly(config, place)
    from .cuda.assembly import CudaAssembly

    return CudaAssembly(config, place, phases, compiler)

"""Start-up on a GPU. Implements `worker.assembly.Assembly`."""

from __future__ import annotations

import torch

from baton.kernels import jit
from baton.kernels.compiler import Compiler, recording

from ...config import EngineConfig
from ...core.engine import EngineCoreConfig
from ...core.layout import KVLayout
from ...model_config import ModelConfig
from ...models import load_model
from ...weights import loading_bar
from ..kv_cache import KVBudget, size_kv_cache
from ..runner import Model
from .memory import Needs, gpu_budget, peak_bytes
from .queue import CudaQueue
from .rehearsal import eager_shapes, idle_steps, largest_step
from .runner import DeviceRunner
from .shapes import CapturedShapes


class CudaAssembly:
    device = "cuda"

    def __init__(self, config: EngineConfig, compiler: Compiler | None) -> None:
        """`compiler` compiles ahead, and is closed when it has."""
        self._config = config
        self._compiler = compiler

    def prepare_kernels(self) -> None:
        """Wakes the device up, and counts what is compiled from here on."""
        jit.mark_starting()
        self._queue = CudaQueue(torch.device("cuda", torch.cuda.current_device()))

    def load_weights(self, model_config: ModelConfig) -> Model:
        with loading_bar() as progress:
            return load_model(model_config, device=self._queue.device, progress=progress)

    def size_kv_cache(self, model: Model, model_config: ModelConfig, layout: KVLayout) -> tuple[int, int]:
        """Compiles the kernels on the way: the largest step is run to see what it takes."""
        context_len = model_config.max_model_len
        budget = self._rehearse(model, model_config, layout)
        return size_kv_cache(self._config, context_len, layout, lambda: budget)

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        """Zeros: a block that was never written may be read next to one that was, and must not hold NaN."""
        return torch.zeros(layout.shape(num_blocks), dtype=getattr(torch, layout.dtype), device=self._queue.device)

    def make_runner(
        self, model: Model, kv: torch.Tensor, model_config: ModelConfig, core_config: EngineCoreConfig
    ) -> DeviceRunner:
        runner = self._runner(model, kv, model_config, core_config.max_model_len)
        if not self._config.enforce_eager:
            runner.capture()
        jit.mark_ready()
        return runner

    def late_compilations(self) -> int:
        return jit.compilations_after_ready()

    def _rehearse(self, model: Model, model_config: ModelConfig, layout: KVLayout) -> KVBudget:
        """Runs what will be run, over a single block and few layers, in runners that are gone afterwards."""
        device, context_len = self._queue.device, model_config.max_model_len
        limits = self._limits(context_len)
        captured = [] if self._config.enforce_eager else list(self._shapes(context_len).largest_first())
        largest_captured = max((shape.num_tokens for shape in captured), default=0)
        eager = list(eager_shapes(**limits, largest_captured=largest_captured))
        shapes = [*captured, *eager]

        def runner() -> DeviceRunner:
            return self._runner(model, self.allocate_kv(layout, 1), model_config, context_len)

        def every_step() -> None:
            largest_step(runner(), **limits)
            idle_steps(runner(), shapes)

        with model.shortened():
            if self._compiler is not None:
                with recording() as variants:
                    every_step()
                self._compiler.compile(variants)
                self._compiler.close()
            every_step()
            step_bytes = max(
                peak_bytes(lambda: largest_step(runner(), **limits), device),
                peak_bytes(lambda: idle_steps(runner(), eager[:1]), device),
            )
            captured_bytes = peak_bytes(lambda: idle_steps(runner(), captured[:1]), device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        needs = Needs(step_bytes, captured_bytes, len(captured))
        return gpu_budget(needs, utilization=self._config.gpu_memory_utilization, free=free, total=total)

    def _runner(self, model: Model, kv: torch.Tensor, model_config: ModelConfig, max_model_len: int) -> DeviceRunner:
        return DeviceRunner(
            model,
            kv,
            self._queue,
            vocab_size=model_config.vocab_size,
            logits_dtype=getattr(torch, model_config.dtype),
            shapes=self._shapes(max_model_len),
            **self._limits(max_model_len),
        )

    def _limits(self, max_model_len: int) -> dict[str, int]:
        config = self._config
        return {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": max_model_len,
        }

    def _shapes(self, max_model_len: int) -> CapturedShapes:
        return CapturedShapes(**self._limits(max_model_len), max_tokens=self._config.max_cudagraph_capture_size)

"""Start-up on a GPU. Implements `DeviceStartup`.

The steps of an engine are run three times before it is ready: recorded on a stub model, so that other processes compile
their kernels while the weights load; launched on the model itself, to measure the memory that they take; and captured
as CUDA graphs. What was recorded is kept for later starts with the same arguments, which then record nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

import baton.kernels
from baton.kernels import compile_server, jit
from baton.kernels.compiler import Compiler, RecordedVariants, Variant, recording

from ..layers.decoder import CausalLM
from ..models import stub_model
from ..parallel import ParallelGroups
from ..worker.backends import DraftModel, Model
from ..worker.backends.cuda import CudaBackend
from ..worker.backends.cuda_shapes import CudaShapes
from ..worker.backends.cuda_stream import CudaStream
from ..worker.runner import ModelRunner
from ..worker.shapes import StepLimits
from ..worker.warmup import ProfileRun, StepMemory, peak_bytes, warm_up_collectives
from .device import RankContext, load_models, step_limits, stub_draft_model
from .kv_cache import allocate_arenas
from .memory import DRIVER_BYTES, GpuMemory
from .phases import Phases
from .step_sizes import StepSizes

_HOST_THREADS = 4  # for an op on the CPU: such ops are small here, and more threads would only wait for each other


class CudaStartup:
    def __init__(self, context: RankContext, steps: StepSizes, phases: Phases, compiler: Compiler | None) -> None:
        """`compiler` compiles kernels before they are launched; it is closed when it has compiled all."""
        self._context = context
        self._steps = steps
        self._phases = phases
        self._compiler = compiler
        torch.cuda.set_device(context.device)
        self._stream = CudaStream(context.device)
        self._dtype: torch.dtype = getattr(torch, context.model_config.dtype)
        self._draft_model: DraftModel | None = None
        self._recorded: RecordedVariants | None = None
        self._new_variants: list[Variant] | None = None  # None: known from an earlier start
        self._late_before = 0

    def prepare_kernels(self) -> None:
        """Set the number of CPU threads, and record the kernels of every step. Other processes compile these while the
        weights load. Compilations are counted from here on.
        """
        self._context.share_cores(most=_HOST_THREADS)
        jit.mark_starting()
        if self._compiler is not None:
            with self._phases("recording"):
                self._order_variants(self._compiler)

    def _order_variants(self, compiler: Compiler) -> None:
        """Submit the kernels of every step to the compiler, and record them first if no earlier start has."""
        self._recorded, model_config = self._recorded_variants(), self._context.model_config
        known = self._recorded.load()
        if known is not None:
            compile_server.settle_cache_keys()  # as `recording` does
            for variant in known:
                compiler.submit(variant)
            return
        with recording(compiler.submit) as self._new_variants:
            for groups in self._context.groups.stubs():
                model = stub_model(model_config, device=self._stream.device, groups=groups)
                draft_model = stub_draft_model(model_config, model, groups)
                self._profile(model, draft_model, groups)
                del model, draft_model
        torch.cuda.empty_cache()

    def _recorded_variants(self) -> RecordedVariants:
        context = self._context
        device = torch.cuda.get_device_properties(context.device)
        facts = [context.config, self._steps, context.member.rank, context.model_config, context.own_caches]
        facts += [device.name, device.multi_processor_count, device.total_memory]
        return RecordedVariants(facts, [Path(__file__).parents[1], Path(baton.kernels.__file__).parent])

    def load_weights(self) -> CausalLM:
        model, self._draft_model = load_models(self._context)
        return model

    def measure_memory(self, model: CausalLM) -> GpuMemory:
        """Run every size of step, so that all kernels have been launched, and the memory of the largest is known."""
        if self._compiler is not None:
            with self._phases("compiling"):
                self._compiler.wait()
                self._compiler.close()
        context = self._context
        context.groups.widest.barrier()  # until the kernels exist that one rank compiles for all
        with self._phases("profile"), model.shortened():
            steps = self._profile(model, self._draft_model, context.groups)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(context.device)
        used, others = total - free, 0
        if context.config.gpu_share < 1:
            others = max(0, used - torch.cuda.memory_reserved(context.device) - DRIVER_BYTES)
        return GpuMemory(total_bytes=total, used_bytes=used, step_bytes=steps.num_bytes, others_bytes=others)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeros: a block that was never written may be read beside one that was, so it must not hold NaN."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._stream.device)

    def make_runner(self, model: CausalLM, arenas: Sequence[torch.Tensor], max_model_len: int) -> ModelRunner:
        runner = self._runner(model, self._draft_model, arenas, self._limits(max_model_len))
        if not self._context.config.enforce_eager:
            with self._phases("capture"):
                runner.capture()
        self._late_before = jit.compilations_after_ready()  # of earlier engines in this process
        num_made = jit.mark_ready()
        if self._recorded is not None:
            if self._new_variants is not None:
                self._recorded.save(self._new_variants)
            elif num_made:
                self._recorded.remove()  # it lacks kernels
        return runner

    def in_order(self) -> AbstractContextManager[object]:
        return self._stream.current()

    def late_compilations(self) -> int:
        return jit.compilations_after_ready() - self._late_before

    def release(self) -> None:
        self._stream.release()

    def _profile(self, model: CausalLM, draft_model: DraftModel | None, groups: ParallelGroups) -> StepMemory:
        """Run everything that will be launched, with a single block in each cache group."""
        caches, eager = self._context.own_caches, self._context.config.enforce_eager
        with self._stream.current():
            warm_up_collectives(model, groups, self._dtype)
        self._stream.synchronize()
        limits = self._limits(self._context.model_config.max_model_len)
        sizes = list(self._shapes(limits).in_capture_order())
        arenas = allocate_arenas(self.allocate, caches, [1] * len(caches.groups))
        return ProfileRun(
            lambda: self._runner(model, draft_model, arenas, limits),
            [] if eager else sizes,
            functools.partial(peak_bytes, device=self._stream.device),
            limits,
            eager_decodes=[size for size in sizes if size.is_decode or size.max_drafts] if eager else [],
        ).run()

    def _runner(
        self, model: Model, draft_model: DraftModel | None, arenas: Sequence[torch.Tensor], limits: StepLimits
    ) -> ModelRunner:
        backend = CudaBackend(self._stream, self._shapes(limits), self._dtype)
        cache_arenas = self._context.cache_arenas(arenas, self.allocate, limits)
        return ModelRunner(model, cache_arenas, backend, limits, self._context.model_config.vocab_size, draft_model)

    def _limits(self, max_model_len: int) -> StepLimits:
        return step_limits(self._context.config, self._steps, max_model_len)

    def _shapes(self, limits: StepLimits) -> CudaShapes:
        return CudaShapes(limits, max_tokens=self._steps.max_cudagraph_capture_size)

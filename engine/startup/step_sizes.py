"""The sizes of steps: requests, tokens, and the largest mix of chunks that is captured.

Arguments take precedence. Otherwise, on a GPU, sizes follow from the model and from the GPU's memory, which indicates
how fast it is. A step with prompts delays the next token of every running answer, so it has as many tokens as take
about `PROMPT_STEP_S`. A mix is captured if the CPU would take longer to launch it than the GPU to run it.
Figures: docs/benchmarks/log.md, "Sizes of steps".
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..config import EngineConfig
from ..hf_config.model_config import ModelConfig
from .weight_counts import active_weights

PROMPT_STEP_S = 0.1
LAUNCH_S = 0.02  # the CPU's time to launch the kernels of a step that is not captured
MIN_TOKENS, MAX_TOKENS = 2048, 16384  # in a step: with fewer a GPU idles, and more help no model
MIN_CAPTURED, MAX_CAPTURED = 1024, 4096


class StepSizes(NamedTuple):
    """Bounds of every step of a rank."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_cudagraph_capture_size: int  # tokens


class _GpuClass(NamedTuple):
    """GPUs of about the same size."""

    min_memory_bytes: int
    max_num_seqs: int
    flop_per_s: float  # for bfloat16 products within a model


_CPU = StepSizes(64, 2048, 0)
_GPUS = (
    _GpuClass(60 << 30, 512, 5e14),  # H100, H200
    _GpuClass(30 << 30, 256, 1.5e14),  # L40S, A6000, A100 with 40 GB
    _GpuClass(0, 128, 0.8e14),  # L4, A10, GeForce
)


def step_sizes(config: EngineConfig, model: ModelConfig, gpu_memory_bytes: int | None) -> StepSizes:
    """Return the step sizes of an engine with a GPU of `gpu_memory_bytes` for each rank; None: on a CPU."""
    chosen = _CPU if gpu_memory_bytes is None else _of_gpu(model, config.tensor_parallel_size, gpu_memory_bytes)
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if tokens is None:
        tokens = max(chosen.max_num_batched_tokens, seqs or 0)
    captured = config.max_cudagraph_capture_size
    return StepSizes(
        max_num_seqs=min(chosen.max_num_seqs, tokens) if seqs is None else seqs,
        max_num_batched_tokens=tokens,
        max_cudagraph_capture_size=chosen.max_cudagraph_capture_size if captured is None else captured,
    )


def _of_gpu(model: ModelConfig, tensor_parallel_size: int, memory_bytes: int) -> StepSizes:
    gpu = next(known for known in _GPUS if memory_bytes >= known.min_memory_bytes)
    tokens_per_s = gpu.flop_per_s / (2 * active_weights(model, tensor_parallel_size))
    return StepSizes(
        gpu.max_num_seqs,
        min(max(MIN_TOKENS, _power_of_two(PROMPT_STEP_S * tokens_per_s)), MAX_TOKENS),
        min(max(MIN_CAPTURED, _power_of_two(LAUNCH_S * tokens_per_s)), MAX_CAPTURED),
    )


def _power_of_two(value: float) -> int:
    """Return the power of two that is nearest by ratio."""
    return 1 << max(0, round(math.log2(value)))

"""Helpers for tests with several caches: small limits, both backends without a GPU, warm-up, answers."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from baton.engine.core.config import CacheGroupConfig, EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_model
from baton.engine.worker.backends import Backend
from baton.engine.worker.backends.cpu import CpuBackend
from baton.engine.worker.backends.cpu_shapes import CpuShapes
from baton.engine.worker.backends.cuda import CudaBackend
from baton.engine.worker.backends.cuda_shapes import CudaShapes
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.shapes import StepLimits
from baton.engine.worker.tables import CacheArenas
from baton.engine.worker.warmup import ProfileRun, warm_up

from ...helpers.inline_stream import InlineStream
from ...helpers.kv_memory import allocate_kv
from .random_workload import random_requests

LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200)


def backend_of(kind: str, *, captured_tokens: int) -> Backend:
    """Make a backend of kind "cpu", or "cuda" with graphs of mixed steps up to `captured_tokens`."""
    if kind == "cpu":
        return CpuBackend(CpuShapes(LIMITS))
    return CudaBackend(InlineStream(), CudaShapes(LIMITS, max_tokens=captured_tokens), torch.float32)


def hybrid_config(
    model: ModelConfig, limits: StepLimits, num_blocks: int, num_slots: int, checkpoint_tokens: int, **changes: Any
) -> EngineCoreConfig:
    """Return the config of an engine whose model has one group with KV blocks, and one with states."""
    return EngineCoreConfig(
        num_blocks=num_blocks + num_slots,
        cache_groups=[
            CacheGroupConfig(num_blocks=num_blocks),
            CacheGroupConfig(num_blocks=num_slots, checkpoint_tokens=checkpoint_tokens),
        ],
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=[2],
        **changes,
    )


def warmed_up_arenas(config: ModelConfig, kind: str, *, captured_tokens: int) -> list[Tensor]:
    """Return the arenas of an engine after its warm-up; they were zero before."""
    model = load_model(config)
    arenas = [allocate_kv(group.blocks, 4).zero_() for group in config.caches.groups]

    def make_runner() -> ModelRunner:
        return ModelRunner(
            model, CacheArenas(arenas), backend_of(kind, captured_tokens=captured_tokens), LIMITS, config.vocab_size
        )

    if kind == "cpu":
        warm_up(make_runner())
    else:
        sizes = list(CudaShapes(LIMITS, max_tokens=captured_tokens).in_capture_order())
        ProfileRun(make_runner, sizes, lambda work: work() or 0, LIMITS).run()
    return arenas


def answers(core: EngineCore, seed: int) -> dict[str, tuple[list[int], object]]:
    """Return the tokens and the finish reason of each of many random requests."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, object] = {}
    for request in random_requests(random.Random(seed), 14):
        core.add(request)
    while core.has_work():
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            ends[output.request_id] = output.finish_reason
    return {name: (tokens[name], ends[name]) for name in tokens}

"""The parts of an engine's start-up that need torch, for `engine.build` to order."""

from __future__ import annotations

import logging
import os

import torch

from baton.kernels import native

from ..core.engine import EngineCoreConfig
from ..model_config import ModelConfig
from ..models import load_model
from ..weights import loading_bar
from .kv_cache import allocate_kv, region_of, size_kv_cache
from .runner import Model, ModelRunner
from .warmup import warm_up

__all__ = ["allocate_kv", "load_weights", "make_runner", "prepare_kernels", "region_of", "size_kv_cache", "warm_up"]

logger = logging.getLogger(__name__)


def prepare_kernels(num_threads: int | None) -> None:
    """Sets how many threads an op uses (every core of this process, unless told otherwise); builds what is missing."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        native.prepare()
    except native.NativeBuildError as error:
        logger.warning("no compiled kernels, so an engine many times slower: %s", error)


def load_weights(model_config: ModelConfig) -> Model:
    with loading_bar() as progress:
        return load_model(model_config, progress=progress)


def make_runner(model: Model, kv: torch.Tensor, config: EngineCoreConfig) -> ModelRunner:
    return ModelRunner(
        model, kv, vocab_size=config.vocab_size, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len
    )

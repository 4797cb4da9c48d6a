"""The number of KV blocks, and the longest sequence that they hold. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config import EngineConfig, InvalidEngineConfig
from ..core.layout import CacheLayout
from ..hf_config.model_config import ModelConfig
from .arenas import arenas_of, divide_memory, engine_caches, least_blocks, least_bytes, longest_sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KVBudget:
    """Memory for blocks, and the name of the engine argument that sets it."""

    num_bytes: int
    setting: str


def size_kv_cache(
    config: EngineConfig,
    max_num_seqs: int,
    context_len: int,
    caches: CacheLayout,
    default_budget: Callable[[], KVBudget],
) -> tuple[int, Sequence[int]]:
    """Return the longest sequence in tokens (at most `context_len`), and the number of blocks of each cache group.

    The number is `num_gpu_blocks_override`, or what fits into the memory (`kv_cache_memory_bytes`, or the default
    budget), but no more than `max_num_seqs` sequences of full length could fill; see `arenas.py`. If `max_model_len` is
    not given, too few blocks reduce the longest sequence.

    Raises `InvalidEngineConfig` if the blocks cannot hold one sequence of the `max_model_len` that was given.
    """
    size = _size_of(config, max_num_seqs, context_len, caches, default_budget)
    if size.num_tokens < context_len:
        logger.warning(
            "max_model_len is %d, not the checkpoint's %d: %s leaves %s for KV, but the full length needs %s",
            size.num_tokens,
            context_len,
            size.setting,
            size.given,
            size.enough,
        )
    return size.num_tokens, size.arenas


def check_given_size(model: ModelConfig, config: EngineConfig) -> None:
    """Check the arguments that size the KV cache, if any is given, as `size_kv_cache` will, without a device.

    Raises `InvalidEngineConfig`.
    """
    if config.kv_size_setting is None:
        return
    caches = engine_caches(model).layout.of_rank(0, config.tensor_parallel_size)  # the ranks' parts are of equal size
    # One sequence fits or does not, however many may run at once.
    _size_of(config, 1, model.max_model_len, caches, lambda: KVBudget(0, ""))


def check_room(config: EngineConfig, caches: CacheLayout, arenas: Sequence[int], free_bytes: int) -> None:
    """Raise `InvalidEngineConfig` if blocks that the arguments ask for take more than a device's free memory."""
    setting = config.kv_size_setting
    num_bytes = sum(size * group.blocks.block_bytes for size, group in zip(arenas, caches.groups, strict=True))
    if setting is not None and num_bytes > free_bytes:
        left = max(0, free_bytes) / 1e9
        raise InvalidEngineConfig(
            setting, f"its KV blocks take {num_bytes / 1e9:.1f} GB, and {left:.1f} GB are left for them: give less"
        )


@dataclass(frozen=True)
class _Size:
    """The blocks of each cache group and the longest sequence that they hold, with parts of messages about both."""

    num_tokens: int
    arenas: Sequence[int]
    setting: str
    given: str
    enough: str


def _size_of(
    config: EngineConfig,
    max_num_seqs: int,
    context_len: int,
    caches: CacheLayout,
    default_budget: Callable[[], KVBudget],
) -> _Size:
    if config.num_gpu_blocks_override is not None:
        given_blocks = config.num_gpu_blocks_override
        arenas = arenas_of(caches, given_blocks, max_num_seqs, context_len)
        setting, given = "num_gpu_blocks_override", f"{given_blocks} blocks"
        enough, fewest = (f"{least_blocks(caches, length)} blocks" for length in (context_len, 1))
    else:
        asked = config.kv_cache_memory_bytes
        budget = default_budget() if asked is None else KVBudget(asked, "kv_cache_memory_bytes")
        arenas = divide_memory(caches, budget.num_bytes, max_num_seqs, context_len)
        setting, given = budget.setting, f"{budget.num_bytes} bytes"
        enough, fewest = (f"{least_bytes(caches, length)} bytes" for length in (context_len, 1))
    fitting = min(longest_sequence(caches, arenas), context_len)
    if fitting < context_len and (config.max_model_len is not None or fitting == 0):
        instead = " or lower max_model_len" if fitting else f", or {fewest} for shorter sequences"
        raise InvalidEngineConfig(
            setting,
            f"{given} hold {fitting} tokens, but a sequence may have {context_len}: give at least {enough}{instead}",
        )
    return _Size(fitting, arenas, setting, given, enough)

"""The number of KV blocks, and the longest sequence that they hold: `size_kv_cache`. No torch.

start    memory measured once weights are loaded and steps have run ──┐
                                                                      ├──> size_kv_cache ──> KVSize
plan     memory assumed (`cluster/planning`) ─────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import EngineConfig, InvalidEngineConfig
from ..core.layout import CacheLayout
from ..hf_config.model_config import ModelConfig
from .arenas import divide_blocks, divide_memory, engine_caches, least_blocks, least_bytes, longest_sequence
from .memory import CpuMemory, GpuMemory, usable_gpu_bytes

# Default of a CPU engine: other engines, their weights and the page cache share the machine's memory.
_SHARE_OF_FREE_MEMORY = 0.25
_MOST_BYTES = 4 << 30
ENOUGH_FREE_BYTES = int(_MOST_BYTES / _SHARE_OF_FREE_MEMORY)  # with more free memory, a CPU engine gets no more blocks
# Blocks of an arena that may cache prefixes beyond full load: 4.2 million tokens. For each of them an engine keeps 180
# bytes in the host's memory, 46 MB for all, laid out within 20 ms; a gateway keeps 70 (`cluster/cached_blocks.py`).
MOST_CACHE_BLOCKS = 1 << 18
_GB = 1e9


@dataclass(frozen=True)
class KVBudget:
    """Memory for blocks, and the name of the engine argument that sets it."""

    num_bytes: int
    setting: str


@dataclass(frozen=True)
class KVSize:
    """The KV blocks of a rank."""

    max_model_len: int  # tokens of the longest sequence, which is that of the model or the one that the blocks hold
    blocks_by_group: Sequence[int]  # of each cache group
    shortened: str | None = None  # why `max_model_len` is less than the model's; None: it is not


def size_kv_cache(
    config: EngineConfig,
    memory: CpuMemory | GpuMemory,
    caches: CacheLayout,
    *,
    max_num_seqs: int,
    context_len: int,
) -> KVSize:
    """Return the blocks of each cache group in a rank, and the longest sequence in tokens, at most `context_len`.

    Starts and plans alike follow this rule. There are as many blocks as the first of these that applies gives,

        num_gpu_blocks_override   so many of each group that keeps all tokens
        kv_cache_memory_bytes     what fits into them
        default of a CPU          what fits into min(free memory / 4, 4 GiB) / ranks on the machine - inputs of drafts
        default of a GPU          what fits into gpu_memory_utilization x total - memory in use - memory of steps;
                                  with gpu_share, of that share and of what this engine has in use

    `arenas.py` divides the memory between groups. An arena has no more blocks than `max_num_seqs` sequences of full
    length could fill, or `MOST_CACHE_BLOCKS` if that is more: the others cache prefixes. By default on a CPU, and
    without prefix caching, there are none of these others. If `max_model_len` is not given, too few blocks reduce the
    longest sequence.

    `caches` is the rank's part. Raises `InvalidEngineConfig` if the blocks cannot hold one sequence of the
    `max_model_len` that was given, or none of any length.
    """
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        blocks = divide_blocks(caches, num_blocks, max_num_seqs, context_len)
        setting, given = "num_gpu_blocks_override", f"{num_blocks} blocks"
        enough, fewest = (f"{least_blocks(caches, length)} blocks" for length in (context_len, 1))
    else:
        budget = kv_budget(config, memory)
        cache_blocks = _most_cache_blocks(config, memory)
        blocks = divide_memory(caches, budget.num_bytes, max_num_seqs, context_len, cache_blocks)
        setting, given = budget.setting, f"{budget.num_bytes} bytes"
        enough, fewest = (f"{least_bytes(caches, length)} bytes" for length in (context_len, 1))
    fitting = min(longest_sequence(caches, blocks), context_len)
    if fitting == context_len:
        return KVSize(context_len, blocks)
    if fitting == 0 and config.kv_size_setting is None and isinstance(memory, GpuMemory):
        raise _no_room(setting, memory, config.gpu_share)
    if config.max_model_len is not None or fitting == 0:
        instead = " or lower max_model_len" if fitting else f", or {fewest} for shorter sequences"
        raise InvalidEngineConfig(
            setting,
            f"{given} hold {fitting} tokens, but a sequence may have {context_len}: give at least {enough}{instead}",
        )
    shortened = (
        f"max_model_len becomes {fitting} instead of {context_len}: {setting} leaves {given} for KV, but the full "
        f"length needs {enough}"
    )
    return KVSize(fitting, blocks, shortened)


def kv_budget(config: EngineConfig, memory: CpuMemory | GpuMemory) -> KVBudget:
    """Return the memory for a rank's blocks, by the rule of `size_kv_cache`, if their number is not given."""
    if config.kv_cache_memory_bytes is not None:
        return KVBudget(config.kv_cache_memory_bytes, "kv_cache_memory_bytes")
    if isinstance(memory, CpuMemory):
        of_machine = min(int(memory.free_bytes * _SHARE_OF_FREE_MEMORY), _MOST_BYTES)
        return KVBudget(max(0, of_machine // memory.num_local - memory.draft_bytes), "kv_cache_memory_bytes")
    own_bytes = memory.used_bytes - memory.others_bytes + memory.step_bytes
    left = min(usable_gpu_bytes(config, memory.total_bytes) - own_bytes, memory.left_bytes)
    return KVBudget(max(0, left), "gpu_memory_utilization" if config.gpu_share == 1 else "gpu_share")


def _most_cache_blocks(config: EngineConfig, memory: CpuMemory | GpuMemory) -> int:
    """Return up to how many blocks of an arena may cache prefixes beyond full load."""
    is_given = isinstance(memory, GpuMemory) or config.kv_cache_memory_bytes is not None
    return MOST_CACHE_BLOCKS if is_given and config.enable_prefix_caching else 0


def _no_room(setting: str, memory: GpuMemory, share: float) -> InvalidEngineConfig:
    whose, used, advice = "weights, the driver and other processes", memory.used_bytes, "raise tensor_parallel_size"
    if share < 1:
        whose, used, advice = "weights and the driver", used - memory.others_bytes, "raise the share (num_gpus)"
    return InvalidEngineConfig(
        setting,
        f"leaves no room for KV blocks: {whose} take {used / _GB:.1f} GB of {share * memory.total_bytes / _GB:.1f}, "
        f"steps {memory.step_bytes / _GB:.1f} GB; {advice}, lower max_num_batched_tokens, or use devices with more "
        "memory",
    )


def check_given_size(model: ModelConfig, config: EngineConfig) -> None:
    """Check the arguments that size the KV cache, if any is given, as `size_kv_cache` will, without a device.

    Raises `InvalidEngineConfig`.
    """
    if config.kv_size_setting is None:
        return
    caches = engine_caches(model).on_each_rank(config.tensor_parallel_size)
    # The arguments decide, whatever memory there is; one sequence fits or does not, however many may run at once.
    size_kv_cache(config, CpuMemory(free_bytes=0), caches, max_num_seqs=1, context_len=model.max_model_len)


def check_blocks_fit(config: EngineConfig, caches: CacheLayout, size: KVSize, left_bytes: int) -> None:
    """Raise `InvalidEngineConfig` if blocks that the arguments ask for take more than a device has left for them.

    `left_bytes` is that of `CpuMemory` or `GpuMemory`.
    """
    setting = config.kv_size_setting
    pairs = zip(size.blocks_by_group, caches.groups, strict=True)
    num_bytes = sum(num_blocks * group.blocks.block_bytes for num_blocks, group in pairs)
    if setting is not None and num_bytes > left_bytes:
        left = max(0, left_bytes) / _GB
        raise InvalidEngineConfig(
            setting, f"its KV blocks take {num_bytes / _GB:.1f} GB, and {left:.1f} GB are left for them: give less"
        )

"""The memory of the KV blocks: the default budgets, and the allocation.

On a GPU, blocks get

    gpu_memory_utilization x total
      - memory in use: weights, the driver, other processes
      - the peak of the largest step, tables and inputs included        measured by the profile run
      - the memory that captured graphs hold                            measured with the largest one
      - a margin for fragmentation of the allocator
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..core.layout import CacheLayout, GroupLayout, StateLayout, draft_places
from ..core.regions import ArenaRegion, CacheRegion
from ..hf_config.model_config import ModelConfig
from ..worker.shapes import StepLimits
from .arenas import engine_caches
from .kv_size import KVBudget

# Default of a CPU engine: other engines, their weights and the page cache share the machine's memory.
_SHARE_OF_FREE_MEMORY = 0.25
_MOST_BYTES = 4 << 30


def allocate_arenas(
    allocate: Callable[[int], torch.Tensor], caches: CacheLayout, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Return the blocks of each cache group, all in one range of memory, so that transfers can register it as a whole.

    `allocate` returns the number of bytes that it is asked for; `caches` is this rank's part. Blocks of tokens have the
    shape of their layout; slots of states are bytes [num_slots, block_bytes].
    """
    starts = [0]
    for group, size in zip(caches.groups, sizes, strict=True):
        starts.append(starts[-1] + -(-size * group.blocks.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory = allocate(starts[-1])
    return [_view(memory[at:], size, group) for at, size, group in zip(starts, sizes, caches.groups, strict=False)]


def allocate_draft_inputs(
    allocate: Callable[[int], torch.Tensor], model: ModelConfig, limits: StepLimits, rank: int, size: int
) -> dict[int, torch.Tensor]:
    """Return, for each of the engine's groups of states, memory for its inputs of drafts: bytes [places of all rows,
    place_bytes].

    It is for `rank` of `size` tensor-parallel ranks. Empty without drafts.
    """
    num_places, groups = limits.max_num_seqs * draft_places(limits.max_drafts), engine_caches(model).of_model
    layouts = {number: layout.of_rank(rank, size) for number, layout in model.draft_inputs.items() if num_places}
    return {
        groups[number]: allocate(num_places * layout.block_bytes).view(num_places, layout.block_bytes)
        for number, layout in layouts.items()
    }


def _view(memory: torch.Tensor, num_blocks: int, group: GroupLayout) -> torch.Tensor:
    memory = memory[: num_blocks * group.blocks.block_bytes]
    if isinstance(group.blocks, StateLayout):
        return memory.view(num_blocks, group.blocks.block_bytes)
    return memory.view(getattr(torch, group.blocks.dtype)).view(group.blocks.shape(num_blocks))


def allocate_on_cpu(num_bytes: int) -> torch.Tensor:
    """Return page-aligned bytes. None of their pages has been touched yet."""
    # Private, because the system gives no huge pages to shared anonymous memory, which is Python's default.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # one block spans many small pages, and attention jumps from block to block
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def region_of(arenas: Sequence[torch.Tensor], caches: CacheLayout, rank: int = 0, size: int = 1) -> CacheRegion:
    """Describe the memory of the arenas, for transfers. Valid as long as the arenas live.

    `caches` is the whole model's; the arenas hold the part of `rank` of `size` tensor-parallel ranks.
    """
    regions = []
    for arena, group in zip(arenas, caches.groups, strict=True):
        heads = group.blocks.heads_of(rank, size)
        regions.append(
            ArenaRegion(arena.data_ptr(), arena.shape[0], str(arena.device), group.blocks, heads.start, len(heads))
        )
    return CacheRegion(caches, tuple(regions))


def cpu_budget(num_members: int = 1, beside_bytes: int = 0) -> KVBudget:
    """Return the default budget of a CPU engine, for each of `num_members` ranks on this machine.

    Together the ranks take a limited share of the memory that is free now, including `beside_bytes`, which each rank
    keeps beside its blocks.
    """
    spare = min(int(available_memory_bytes() * _SHARE_OF_FREE_MEMORY), _MOST_BYTES) // num_members
    return KVBudget(max(0, spare - beside_bytes), "kv_cache_memory_bytes")


def gpu_budget(step_memory_bytes: int, *, usable: int, free: int, total: int) -> KVBudget:
    """Return the memory left for blocks on a GPU that has `free` of `total` bytes now, of which all processes together
    may use `usable` (`weight_counts.usable_gpu_bytes`).

    `step_memory_bytes` is the runner's memory beside weights and blocks.
    """
    left = usable - (total - free) - step_memory_bytes
    return KVBudget(max(0, left), "gpu_memory_utilization")


def available_memory_bytes() -> int:
    """Return the bytes that this process can take without swapping: the machine's, or those of its cgroup if fewer."""
    machine = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroups, or version 1
        return machine
    return machine if limit == "max" else max(0, min(machine, int(limit) - used))

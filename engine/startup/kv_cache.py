"""The memory of the KV blocks, and of what is kept beside them, allocated and described for transfers."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from ..core.layout import CacheLayout, GroupLayout, StateLayout, draft_places
from ..core.regions import ArenaRegion, CacheRegion
from ..hf_config.model_config import ModelConfig
from ..worker.shapes import StepLimits
from .arenas import engine_caches


def allocate_arenas(
    allocate: Callable[[int], torch.Tensor], caches: CacheLayout, blocks_by_group: Sequence[int]
) -> list[torch.Tensor]:
    """Return the blocks of each cache group, all in one range of memory, so that transfers can register it as a whole.

    `allocate` returns the number of bytes that it is asked for; `caches` is this rank's part. Blocks of tokens have the
    shape of their layout; slots of states are bytes [num_slots, block_bytes].
    """
    starts = [0]
    for group, num_blocks in zip(caches.groups, blocks_by_group, strict=True):
        starts.append(starts[-1] + -(-num_blocks * group.blocks.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory = allocate(starts[-1])
    placed = zip(starts, blocks_by_group, caches.groups, strict=False)
    return [_view(memory[start:], num_blocks, group) for start, num_blocks, group in placed]


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

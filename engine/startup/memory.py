"""The memory of one rank's device: measured when an engine starts, assumed by `baton plan`. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import EngineConfig

DRIVER_BYTES = 2 << 30  # of a GPU's memory, for its context, captured steps and libraries; measured on an H200


@dataclass(frozen=True, kw_only=True)
class CpuMemory:
    """The memory of the machine on whose CPU a rank runs, once the rank's weights are loaded."""

    free_bytes: int  # of the machine; a plan cannot know it
    num_local: int = 1  # ranks of the group on this machine, which share it
    draft_bytes: int = 0  # of the rank's inputs of drafts (`arenas.draft_bytes`), beside its blocks

    @property
    def left_bytes(self) -> int:
        """The rank's part of the free memory, without what it keeps beside its blocks."""
        return self.free_bytes // self.num_local - self.draft_bytes


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The memory of a rank's GPU, once the rank's weights are loaded."""

    total_bytes: int
    used_bytes: int  # by weights, the driver, other processes
    step_bytes: int  # that the runner takes beside weights and blocks (`StepMemory`); a plan estimates it
    others_bytes: int = 0  # of those in use, what other engines take from their shares of the GPU

    @property
    def left_bytes(self) -> int:
        """The free memory, without what steps will take of it."""
        return self.total_bytes - self.used_bytes - self.step_bytes


def usable_gpu_bytes(config: EngineConfig, total_bytes: int) -> int:
    """Return how many of a GPU's bytes may be in use, so that an engine starts.

    They are for all processes together; for this engine alone if it has a share of the GPU (`gpu_share`). If
    `gpu_memory_utilization` does not size the blocks, they are all.
    """
    if config.kv_size_setting is None:
        return int(config.gpu_share * config.gpu_memory_utilization * total_bytes)
    return total_bytes


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

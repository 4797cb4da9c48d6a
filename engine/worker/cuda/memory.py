"""How much of a GPU's memory is left for KV blocks.

gpu_memory_utilization x total
  - what is in use: weights, the driver, other processes
  - what the largest step allocates, tables and inputs included        measured: see `rehearsal`
  - what captured steps hold                                           measured on the largest
  - a margin for what the allocator cannot use
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kv_cache import KVBudget

_GRAPH_BYTES = 4 << 20  # of one captured step, beside the memory that all of them share
_SPARE_BYTES = 256 << 20
_FRAGMENTS = 0.05  # of the peak


@dataclass(frozen=True)
class Needs:
    """What a runner takes beside weights and blocks."""

    step_bytes: int  # at the peak of the largest step
    captured_bytes: int  # of the largest captured step
    num_captured: int

    @property
    def num_bytes(self) -> int:
        captured = self.captured_bytes + self.num_captured * _GRAPH_BYTES
        return int(self.step_bytes * (1 + _FRAGMENTS)) + captured + _SPARE_BYTES


def gpu_budget(needs: Needs, *, utilization: float, free: int, total: int) -> KVBudget:
    """What is left for blocks, of a device of which so much is `free` now."""
    left = int(utilization * total) - (total - free) - needs.num_bytes
    return KVBudget(max(0, left), "gpu_memory_utilization")


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """What `work` holds at its peak beyond what it leaves behind: libraries keep what they took at their first call."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

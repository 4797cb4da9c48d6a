"""KV memory of one cache group on a CPU."""

from __future__ import annotations

import torch

from baton.engine.core.layout import CacheKind, CacheLayout, GroupLayout, KVLayout, StateLayout
from baton.engine.startup.kv_cache import allocate_arenas, allocate_on_cpu


def allocate_kv(layout: KVLayout | StateLayout, num_blocks: int) -> torch.Tensor:
    """Allocate `num_blocks` blocks in the shape that an engine would give them."""
    kind = CacheKind.STATE if isinstance(layout, StateLayout) else CacheKind.FULL
    group = GroupLayout(kind=kind, window=None, layers=tuple(range(layout.num_layers)), blocks=layout)
    (arena,) = allocate_arenas(allocate_on_cpu, CacheLayout((group,)), [num_blocks])
    return arena

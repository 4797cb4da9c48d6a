"""Attention over the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from . import cpu, reference
from .batch import AttentionBatch

__all__ = ["AttentionBatch", "paged_attention"]


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, H, D] over `layer` of kv [blocks, KV heads, layers, 2, block_size, D] -> [T, H, D].

    Query head h reads KV head h // (H / KV heads). A query sees the keys up to its own position, the newest `window` of
    them (itself included) where one is given. Sums are float32. The KV of the step's own tokens must be in the cache
    already; blocks past a sequence's end are not read. On a CPU, a token's result is bitwise the same in any batch and
    however its prompt was cut into chunks.

    `out` must not overlap q. Raises `ValueError` for a window below 1 or heads that do not divide.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: give at least 1 (a query sees itself), or None for no limit")
    if q.shape[1] % kv.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide evenly over {kv.shape[1]} KV heads")
    run = cpu.paged_attention if q.is_cpu else reference.paged_attention
    return run(q, kv, layer, batch, scale=scale, window=window, out=out)

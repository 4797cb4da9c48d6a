"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from baton.kernels.attention_batch import SHORT_CONTEXTS, AttentionBatch
from baton.kernels.kv_rows import kv_rows

from . import cpu, reference
from .rule import AttentionRule

__all__ = ["SHORT_CONTEXTS", "AttentionBatch", "AttentionRule", "paged_attention", "prepare"]


def prepare(batch: AttentionBatch, kv: Tensor, *, num_heads: int, head_dim: int | None = None) -> AttentionBatch:
    """Return the batch with the plan that its device's kernels need. Call it once per step, before the first layer.

    On a GPU this launches a few small kernels and reads shapes only, so a CUDA graph may capture it: each replay makes
    the plan anew from the lengths that are on the device then. `head_dim` is the width of queries and keys, if it is
    not the width of the cache.
    """
    if not batch.seq_lens.is_cuda:
        return batch
    from . import gpu

    return gpu.prepare(batch, kv, num_heads=num_heads, head_dim=head_dim)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    rule: AttentionRule,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of q [T, H, D] over `layer` of kv (layout: `kv_rows`) -> [T, H, width of a value].

    Query head h reads KV head h // (H / KV heads). `rule` is the layer's formula; make it once per layer, not per call.
    Sums are float32. The KV of the step's own tokens must already be in the cache. Blocks past a sequence's end, and
    those behind the window of its first query, may hold anything, NaN included. On a CPU, a token's result is bitwise
    the same in any batch, and however its prompt was cut into chunks.

    Rows of padding (sequences of length 0, tokens after the last sequence) become zero. `out` must be contiguous and
    not overlap q. On a GPU, the batch must come from `prepare`. Raises `ValueError` if KV heads do not divide query
    heads, the number of sinks is not the number of query heads, `out` or the cache's width do not match, or the batch
    is not prepared.
    """
    if q.shape[1] % kv.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide evenly over {kv.shape[1]} KV heads")
    rule.check_heads(q.shape[1])
    if out is not None:
        shape = (*q.shape[:2], kv_rows(kv, q.shape[2]).value_dim)
        if out.shape != shape or out.dtype != q.dtype or not out.is_contiguous():
            raise ValueError(f"out is {out.dtype} {list(out.shape)}: give contiguous {q.dtype} {list(shape)}")
    return _implementation(q)(q, kv, layer, batch, rule, out=out)


def _implementation(q: Tensor) -> Callable[..., Tensor]:
    if q.is_cuda:
        from . import gpu

        return gpu.paged_attention
    return cpu.paged_attention if q.is_cpu else reference.paged_attention

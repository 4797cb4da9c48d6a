"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import cpu, reference
from .batch import SHORT_CONTEXTS, AttentionBatch

__all__ = ["SHORT_CONTEXTS", "AttentionBatch", "paged_attention", "prepare"]


def prepare(batch: AttentionBatch, *, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionBatch:
    """The batch, with the plan that its device's kernels need; call it once a step, before the first layer.

    On a GPU this launches a few small kernels and looks at shapes only, so that a captured graph may hold it: whenever
    the graph runs, the plan is made anew from the lengths that lie on the device then.
    """
    if not batch.seq_lens.is_cuda:
        return batch
    from . import gpu

    return gpu.prepare(batch, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, H, D] over `layer` of kv [blocks, KV heads, layers, 2, block_size, D] -> [T, H, D].

    Query head h reads KV head h // (H / KV heads). A query sees the keys up to its own position, the newest `window` of
    them (itself included) where one is given. Sums are float32. The KV of the step's own tokens must be in the cache
    already; blocks past a sequence's end are not read. On a CPU, a token's result is bitwise the same in any batch and
    however its prompt was cut into chunks.

    * `soft_cap`: a score becomes soft_cap * tanh(score / soft_cap), after `scale`.
    * `sinks` [H] float32: one more score for each head, without a key; it takes weight and gives no value.
    * `k_scale`, `v_scale` ([] or [1] float32): what the stored keys and values are to be multiplied by; for a cache in
      float8_e4m3fn.

    Rows of padding (sequences of length 0, tokens behind the last sequence) become zero. `out` is contiguous and does
    not overlap q. On a GPU the batch comes from `prepare`. Raises `ValueError` for a window or a cap that makes no
    sense, heads that do not divide, another `out` than that, and a batch that is not prepared.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: give at least 1 (a query sees itself), or None for no limit")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}: give more than 0, or None for no cap")
    if q.shape[1] % kv.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide evenly over {kv.shape[1]} KV heads")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks has shape {list(sinks.shape)}: give one for each of {q.shape[1]} query heads")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}: give contiguous {q.dtype} {list(q.shape)}")
    return _implementation(q)(
        q,
        kv,
        layer,
        batch,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
    )


def _implementation(q: Tensor) -> Callable[..., Tensor]:
    if q.is_cuda:
        from . import gpu

        return gpu.paged_attention
    return cpu.paged_attention if q.is_cpu else reference.paged_attention

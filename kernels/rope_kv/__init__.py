"""Head norm, rotary position embedding and the KV cache write, fused."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch

from . import cpu, reference

__all__ = ["rope_and_cache"]


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    *,
    rotary_dim: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Norm and rotate q [T, H, D] in place, write k [T, KV, D] and v [T, KV, value width] to `layer` of kv, return q.

    k and v go to the batch's slots (layout: `kernels.kv_rows`). Each head of q and k is normed, if weights are given
    (RMSNorm with `q_norm`, `k_norm` [D], both of q's dtype or float32, and `eps`), and rotated (Su et al.,
    arXiv:2104.09864): dimensions i and i + rotary_dim / 2 are a pair; those from rotary_dim on are not rotated.
    `cos_sin` [max_positions, 2 n] float32 has the cosines of the first n pairs, then their sines; further pairs are not
    rotated. `rotary_dim` is 2 n by default. Computed in float32, rounded once. q, k and v may be views of one tensor:
    only their last two dimensions must be contiguous.

    An 8-bit cache stores `k / k_scale` and `v / v_scale` (float32, one element), rounded to nearest and clamped to the
    dtype's range. Tokens of slot -1 are not written. Without heads of k and v, nothing is written: such a layer reads
    another layer's cache. The contents of k are undefined afterwards.
    """
    run = cpu.rope_and_cache if q.is_cpu else reference.rope_and_cache
    if q.is_cuda:
        from . import gpu

        run = gpu.rope_and_cache
    return run(
        q,
        k,
        v,
        cos_sin,
        kv,
        layer,
        batch,
        rotary_dim=rotary_dim,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        k_scale=k_scale,
        v_scale=v_scale,
    )

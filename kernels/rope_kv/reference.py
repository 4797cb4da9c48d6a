"""The definition of the fused head norm, rotation and KV write."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.attention.batch import AttentionBatch


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See `baton.kernels.rope_kv.rope_and_cache`. Computes in float32 (float64 where `q` is) and rounds once."""
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    cos, sin = cos_sin[batch.positions].to(compute_dtype).unsqueeze(1).chunk(2, dim=-1)
    for heads, norm in ((q, q_norm), (k, k_norm)):
        values = heads.to(compute_dtype)
        if norm is not None:
            values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * norm.to(compute_dtype)
        heads.copy_(_rotate(values, cos, sin))
    block_size = kv.shape[4]
    blocks, offsets = batch.slots // block_size, batch.slots % block_size
    kv[blocks, :, layer, 0, offsets] = k.to(kv.dtype)
    kv[blocks, :, layer, 1, offsets] = v.to(kv.dtype)
    return q


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates dimension i against i + rotary_dim / 2 ("neox style"); dimensions from rotary_dim on stay as they are."""
    half = cos.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

"""Reference of the fused head norm, rotation and KV write."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch


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
    """See `baton.kernels.rope_kv.rope_and_cache`. Computes in float32 (float64 if `q` is) and rounds once."""
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    cos, sin = cos_sin[batch.positions].to(compute_dtype).unsqueeze(1).chunk(2, dim=-1)
    for heads, norm in ((q, q_norm), (k, k_norm)):
        values = heads.to(compute_dtype)
        if norm is not None:
            values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * norm.to(compute_dtype)
        heads.copy_(_rotate(values, cos, sin, (rotary_dim or cos_sin.shape[1]) // 2))
    if k.shape[1] == 0:
        return q
    kept = batch.slots >= 0
    slots, block_size = batch.slots[kept], kv.shape[4]
    places = bits(kv)[:, :, layer]
    planes = places.unbind(2) if kv.shape[3] == 2 else places[:, :, 0].split([k.shape[2], v.shape[2]], dim=-1)
    for plane, values, scale in zip(planes, (k, v), (k_scale, v_scale), strict=True):
        plane[slots // block_size, :, slots % block_size] = bits(_narrowed(values[kept], scale, kv.dtype))
    return q


def _narrowed(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `values / scale` as `dtype`, clamped to its largest number."""
    if scale is not None:
        values = values.to(torch.promote_types(values.dtype, torch.float32)) / scale
    if dtype.itemsize == 1:
        values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return values.to(dtype)


def bits(values: Tensor) -> Tensor:
    """View 8-bit floating-point numbers as bytes, since torch cannot index them."""
    return values.view(torch.uint8) if values.dtype.itemsize == 1 else values


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """Rotate dimensions i and i + half as a pair ("neox style"), for each i with a cosine; others are unchanged."""
    turning = cos.shape[-1]
    still = half - turning
    sizes = [turning, still, turning, still, heads.shape[-1] - 2 * half]
    first, before, second, behind, rest = heads.split(sizes, dim=-1)
    return torch.cat([first * cos - second * sin, before, second * cos + first * sin, behind, rest], dim=-1)

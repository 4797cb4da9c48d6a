"""Reference of RMSNorm (Zhang and Sennrich, arXiv:1910.07467), with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """See `baton.kernels.rms_norm.rms_norm`. The sum is rounded to x's dtype; its norm is computed in float32."""
    if residual is None:
        return _normed(x, weight, eps)
    total = x + residual
    return _normed(total, weight, eps), total


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    values = x.to(compute_dtype)
    scaled = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(compute_dtype)).to(x.dtype)

"""Reference of RMSNorm (Zhang and Sennrich, arXiv:1910.07467), with a residual addition before it or a gate."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from baton.kernels import elementwise


class Gating(enum.Enum):
    """SILU: x * sigmoid(x) (Gated DeltaNet, Mamba-2); SIGMOID: sigmoid(x) (Kimi Delta Attention)."""

    SILU = "silu"
    SIGMOID = "sigmoid"


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


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    eps: float,
    *,
    gating: Gating = Gating.SILU,
    gate_first: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.rms_norm.gated_rms_norm`."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    logits = gate.to(compute_dtype)
    factor = elementwise.sigmoid(logits) if gating is Gating.SIGMOID else elementwise.silu(logits)
    values = x.to(compute_dtype)
    result = _normed(values * factor, weight, eps) if gate_first else _normed(values, weight, eps) * factor
    result = result.to(x.dtype)
    return result if out is None else out.copy_(result)

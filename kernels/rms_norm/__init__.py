"""RMSNorm of rows, with the residual addition before it."""

from __future__ import annotations

from torch import Tensor

from . import cpu, reference

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension of x [..., N]; x's shape and dtype.

    weight [N] is of x's dtype, or float32 where that would round it (norms that are stored as their distance from 1).
    With `residual` (x's shape and dtype): the pair (norm of the sum, sum), sum = x + residual. Computed in float32 and
    rounded once. A row's result does not depend on the other rows.
    """
    if x.is_cpu:
        return cpu.rms_norm(x, weight, eps, residual)
    if x.is_cuda:
        from . import gpu

        return gpu.rms_norm(x, weight, eps, residual)
    return reference.rms_norm(x, weight, eps, residual)

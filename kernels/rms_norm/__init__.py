"""RMSNorm of rows, optionally after a residual addition, or of heads, with a gate before or after it."""

from __future__ import annotations

from torch import Tensor

from . import cpu, reference
from .reference import Gating

__all__ = ["Gating", "gated_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension of x [..., N]; x's shape and dtype.

    weight [N] is of x's dtype, or float32 if x's dtype would round it (norms that add 1 to the stored weight). With
    `residual` (x's shape and dtype), return the pair (norm of the sum, sum), where sum = x + residual. Computed in
    float32, rounded once. A row's result does not depend on other rows; on a GPU, its last bits depend on their number.
    """
    if x.is_cpu:
        return cpu.rms_norm(x, weight, eps, residual)
    if x.is_cuda:
        from . import gpu

        return gpu.rms_norm(x, weight, eps, residual)
    return reference.rms_norm(x, weight, eps, residual)


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
    """Compute `x / sqrt(mean(x^2) + eps) * weight * gating(gate)` over each head of x; [T, H, D] in x's dtype.

    With `gate_first`, it is the norm of `x * gating(gate)`, times weight. x and gate are [T, H, D] of one dtype;
    weight, [D] or [H, D], is of the same dtype or float32. Computed in float32, rounded once. Tokens of x, gate and out
    may have any stride; a token's heads are contiguous. Raises `ValueError` for tensors that do not match.
    """
    views = (x, gate, *(() if out is None else (out,)))
    fits = x.dim() == 3 and weight.shape in (x.shape[2:], x.shape[1:]) and weight.is_contiguous()
    if not fits or any(view.shape != x.shape for view in views):
        raise ValueError(
            f"x {list(x.shape)} with weight {list(weight.shape)} and gate {list(gate.shape)}: give x and gate "
            "[T, H, D] and contiguous weight [D] or [H, D]"
        )
    if len(x) and not all(view[0].is_contiguous() for view in views):
        raise ValueError("the heads of a token must be contiguous, in x, gate and out")
    run = cpu.gated_rms_norm if x.is_cpu else reference.gated_rms_norm
    if x.is_cuda:
        from . import gpu

        run = gpu.gated_rms_norm
    return run(x, weight, gate, eps, gating=gating, gate_first=gate_first, out=out)

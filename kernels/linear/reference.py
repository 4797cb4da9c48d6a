"""Reference of fused linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.activation.reference import Activation, Pointwise, activation_and_mul, pointwise
from baton.kernels.rms_norm.reference import rms_norm

from .operands import RowNorm


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Pointwise | None = None,
    norm: RowNorm | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.linear.linear`; weight [N, K]. Sums in float32 (float64 if x is), rounded once a step."""
    product = _product(x, weight, bias, norm)
    if activation is not None:
        wide = product.to(torch.promote_types(product.dtype, torch.float32))
        product = pointwise(wide, activation).to(product.dtype)
    return product if add_to is None else add_to.add_(product)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = Activation.SILU,
    norm: RowNorm | None = None,
) -> Tensor:
    """See `baton.kernels.linear.gated_linear`; weight [2 F, K]."""
    return activation_and_mul(_product(x, weight, bias, norm), activation)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, norm: RowNorm | None) -> Tensor:
    if norm is not None:
        normed = rms_norm(x, norm.weight, norm.eps)
        assert isinstance(normed, Tensor)
        x = normed
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    result = x.to(compute_dtype) @ weight.to(compute_dtype).T
    if bias is not None:
        result = result + bias.to(compute_dtype)
    return result.to(x.dtype)

"""Linear layers, fused with the norm before them and the activation or residual addition after them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from baton.kernels.activation import Activation, Pointwise, activate_each, activation_and_mul

from . import cpu
from .operands import PackedWeight, RowNorm, pack

__all__ = ["Activation", "PackedWeight", "Pointwise", "RowNorm", "gated_linear", "linear", "pack"]


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: Pointwise | None = None,
    norm: RowNorm | None = None,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `norm(x) @ weight.T + bias`: x [T, K], weight [N, K], bias [N] -> [T, N], of one type; sums in float32.

    The result is written to `out` [T, N] if given. With `add_to` [T, N], it is added to `add_to` in place, which is
    returned; do not give both. Without `add_to`, an `activation` may be applied to the result, which may not be rounded
    before it.

    With a weight in panels (on a CPU), a row of the result is bitwise independent of the other rows. Otherwise the
    algorithm depends on T, and so may the last bits.
    """
    if add_to is not None and out is not None:
        raise ValueError("a result goes into `out` or is added to `add_to`: give one of them")
    if add_to is not None and activation is not None:
        raise ValueError("a result is activated or added to `add_to`: give one of them")
    if x.is_cuda:
        from . import gpu

        return gpu.linear(x, weight.data, bias, norm=norm, add_to=add_to, out=out, activation=activation)
    product = _product(x if norm is None else norm(x), weight, bias)
    if add_to is not None:
        return add_to.add_(product)
    if activation is not None:
        product = activate_each(product, activation)
    return product if out is None else out.copy_(product)


def gated_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: Activation = Activation.SILU,
    norm: RowNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `activation(gate) * up` [T, F], with gate and up = `linear(x, weight, bias, norm=norm)`.

    weight is [2 F, K], gates first. The product may not be rounded before the activation.
    """
    if x.is_cuda:
        from . import gpu

        return gpu.linear(x, weight.data, bias, norm=norm, add_to=None, out=out, activation=activation)
    return activation_and_mul(_product(x if norm is None else norm(x), weight, bias), activation, out)


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    if weight.in_panels:
        return cpu.linear(x, weight.data, weight.shape, bias)
    return functional.linear(x, weight.data, bias)

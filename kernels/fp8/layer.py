"""A linear layer over a weight in 8 bits, called as those of `baton.kernels.linear` are."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.linear import RowNorm
from baton.kernels.silu_and_mul import silu_and_mul

from . import reference
from .weight import Fp8Weight


def linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`norm(x) @ weight.T + bias`: x [T, K], bias [N] -> [T, N], all of one type.

    The result goes into `out` [T, N] where that is given. With `add_to` [T, N] it is added to what that holds, in
    place, and `add_to` is returned. A norm need not be rounded before its values are brought to 8 bits. Raises
    `ValueError` where both are given, or for shapes that do not fit.
    """
    if add_to is not None and out is not None:
        raise ValueError("a result goes into `out` or is added to `add_to`: give one of them")
    _check(x, weight, bias, out if add_to is None else add_to)
    if x.is_cuda:
        from . import gpu

        return gpu.linear(x, weight, bias, norm=norm, add_to=add_to, out=out)
    return reference.linear(x, weight, bias, norm=norm, add_to=add_to, out=out)


def gated_linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`silu(gate) * up` of gate and up = `linear(x, weight, bias, norm=norm)`; weight [2 F, K] -> [T, F]."""
    return silu_and_mul(linear(x, weight, bias, norm=norm), out)


def _check(x: Tensor, weight: Fp8Weight, bias: Tensor | None, out: Tensor | None) -> None:
    num_columns, depth = weight.shape
    if x.dim() != 2 or x.shape[1] != depth:
        raise ValueError(f"x is {list(x.shape)}: give [tokens, {depth}]")
    if bias is not None and bias.shape != (num_columns,):
        raise ValueError(f"bias is {list(bias.shape)}: give [{num_columns}]")
    wanted = (x.shape[0], num_columns)
    if out is not None and (out.shape != wanted or out.dtype != x.dtype or out.stride(1) != 1):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}: give {x.dtype} {list(wanted)}, each row without gaps")

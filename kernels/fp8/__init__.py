"""Linear layers over weights in E4M3, the 8-bit floating-point format with a range of 448 (arXiv:2209.05433).

    weight    [N, K] float8_e4m3fn, with float32 scales: one per row [N], or per block of 128 x 128 [N / 128, K / 128]
    x [T, K]  is quantized dynamically, scaled by its largest value: per token if the weight has a scale per row, per
              group of 128 values of a token if it has a scale per block

Value = stored * scale. Products are summed in float32 and rounded once, to the type of x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.activation import Activation, activation_and_mul
from baton.kernels.linear import RowNorm

from . import reference
from .weight import BLOCK, Fp8Weight, dequantize, quantize_weight

__all__ = ["BLOCK", "Fp8Weight", "dequantize", "gated_linear", "has_gpu_kernels", "linear", "quantize_weight"]


def has_gpu_kernels(device: torch.device) -> bool:
    """Return whether the device has FP8 tensor cores: Ada, Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `norm(x) @ weight.T + bias`: x [T, K], bias [N] -> [T, N], all of one type.

    The result is written to `out` [T, N] if given. With `add_to` [T, N], it is added to `add_to` in place, which is
    returned. The norm's values may be quantized without being rounded to x's dtype first. Raises `ValueError` if both
    `out` and `add_to` are given, or for shapes that do not match.
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
    activation: Activation = Activation.SILU,
    norm: RowNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `activation(gate) * up` [T, F], with gate and up = `linear(x, weight, bias, norm=norm)`.

    weight is [2 F, K], gates first.
    """
    return activation_and_mul(linear(x, weight, bias, norm=norm), activation, out)


def _check(x: Tensor, weight: Fp8Weight, bias: Tensor | None, out: Tensor | None) -> None:
    num_columns, depth = weight.shape
    if x.dim() != 2 or x.shape[1] != depth:
        raise ValueError(f"x is {list(x.shape)}: give [tokens, {depth}]")
    if bias is not None and bias.shape != (num_columns,):
        raise ValueError(f"bias is {list(bias.shape)}: give [{num_columns}]")
    wanted = (x.shape[0], num_columns)
    if out is not None and (out.shape != wanted or out.dtype != x.dtype or out.stride(1) != 1):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}: give {x.dtype} {list(wanted)}, each row without gaps")

"""FP8 linear layers on Ada, Hopper and later.

    x ──quantization.quantize──> E4M3 and scales ──gemm.product, or torch's──> out

For few tokens, our own matrix product lets every multiprocessor read a share of the weight. For many tokens, torch's
product is used if it supports the shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.linear import RowNorm

from ..weight import BLOCK, Fp8Weight
from .gemm import product
from .quantization import quantize

MANY_TOKENS = {"rows": 256, "blocks": 128}  # granularity of the weight's scales -> tokens above which torch's is used


def linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.fp8.linear`."""
    target = out if add_to is None else add_to
    if target is None:
        target = x.new_empty(x.shape[0], weight.shape[0])
    if x.shape[0] == 0:
        return target
    quantized, scale = quantize(x, BLOCK if weight.in_blocks else x.shape[1], norm)
    if x.shape[0] > MANY_TOKENS[weight.scaled_by] and _torch_takes(weight, target):
        if add_to is None:
            return _product_of_torch(quantized, scale, weight, bias, target)
        return add_to.add_(_product_of_torch(quantized, scale, weight, bias, torch.empty_like(target)))
    return product(quantized, scale, weight, bias, target, add=add_to is not None)


def _torch_takes(weight: Fp8Weight, out: Tensor) -> bool:
    """Return whether torch supports the product: bfloat16 output, and rows of block scales of 16-byte multiples."""
    columns, depth = weight.shape
    fits = columns % 16 == 0 and depth % (4 * BLOCK if weight.in_blocks else 16) == 0
    return fits and out.dtype == torch.bfloat16 and out.is_contiguous()


def _product_of_torch(quantized: Tensor, scale: Tensor, weight: Fp8Weight, bias: Tensor | None, out: Tensor) -> Tensor:
    columns = weight.scale.T if weight.in_blocks else weight.scale[None, :]
    torch._scaled_mm(quantized, weight.data.T, scale.T, columns, out_dtype=out.dtype, use_fast_accum=False, out=out)
    return out if bias is None else out.add_(bias)

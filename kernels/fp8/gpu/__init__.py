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
TOKENS_OF_TORCH = 4  # its product takes a multiple of so many tokens if scales are per block


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
    if x.shape[0] > MANY_TOKENS[weight.scaled_by] and _torch_takes(weight, target):
        return _linear_of_torch(x, weight, bias, norm, target, add=add_to is not None)
    quantized, scale = quantize(x, BLOCK if weight.in_blocks else x.shape[1], norm)
    return product(quantized, scale, weight, bias, target, add=add_to is not None)


def _torch_takes(weight: Fp8Weight, out: Tensor) -> bool:
    """Return whether torch supports the product: bfloat16 output, and rows of block scales of 16-byte multiples."""
    columns, depth = weight.shape
    fits = columns % 16 == 0 and depth % (4 * BLOCK if weight.in_blocks else 16) == 0
    return fits and out.dtype == torch.bfloat16 and out.is_contiguous()


def _linear_of_torch(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, norm: RowNorm | None, target: Tensor, *, add: bool
) -> Tensor:
    group, multiple_of = (BLOCK, TOKENS_OF_TORCH) if weight.in_blocks else (x.shape[1], 1)
    quantized, scale = quantize(x, group, norm, multiple_of=multiple_of)
    is_whole = len(quantized) == len(x)
    out = target if is_whole and not add else target.new_empty(len(quantized), target.shape[1])
    columns = weight.scale.T if weight.in_blocks else weight.scale[None, :]
    torch._scaled_mm(quantized, weight.data.T, scale.T, columns, out_dtype=out.dtype, use_fast_accum=False, out=out)
    if add:
        target.add_(out[: len(x)])
    elif not is_whole:
        target.copy_(out[: len(x)])
    return target if bias is None else target.add_(bias)

"""Linear layers on a GPU, by one of three methods. Measurements decide which one is used for a shape (`tuned/`).

FEW_TOKENS      norm, product, bias, gate and residual in one kernel, without tensor cores
TILES           product, bias, gate and residual in one kernel, with tensor cores
LIBRARY         torch's matrix product, which also adds to a residual; norm and activation are separate kernels
"""

from __future__ import annotations

from enum import IntEnum

import torch
import triton
from torch import Tensor
from torch.nn import functional

from baton.kernels import tuned
from baton.kernels.activation import Activation, Pointwise, activate_each, activation_and_mul

from ..operands import RowNorm
from .gemm import multiply_tiles
from .gemv import MAX_TOKENS, stream_weight

SMALLEST_TILE = 16  # tokens: the least short side of a product on the tensor cores
MANY_TOKENS = 256  # with more tokens, the library is used
NARROWEST_STEP = 128  # for depths that are not multiples of this, the library is used


class Method(IntEnum):
    LIBRARY = 0
    FEW_TOKENS = 1
    TILES = 2


NOTHING = {"PRELOAD": 0, "PREFETCH": 0, "SPLIT": 1, "TOKENS": 0, "num_stages": 1}
UNTUNED_FEW = {"method": Method.FEW_TOKENS, "BLOCK_N": 8, "BLOCK_K": 1024, "num_warps": 4, **NOTHING, "PRELOAD": 2}
UNTUNED_MANY = {"method": Method.LIBRARY, "BLOCK_N": 0, "BLOCK_K": 0, "num_warps": 0, **NOTHING}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: RowNorm | None,
    add_to: Tensor | None,
    out: Tensor | None,
    activation: Activation | Pointwise | None,
    options: tuned.Options | None = None,
) -> Tensor:
    """See `baton.kernels.linear.linear` and, for an `Activation`, `gated_linear`. `options` replace the tuned ones."""
    num_tokens, depth = x.shape
    gated = isinstance(activation, Activation)
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if num_tokens == 0:
        return add_to if add_to is not None else x.new_empty(0, columns) if out is None else out
    if options is None:
        options = options_for(num_tokens, columns, depth, x.device, gated=gated)
    method = fitting_method(options, x, weight)
    if method is Method.LIBRARY:
        return _library(x, weight, bias, norm, add_to, out, activation)

    target = add_to if add_to is not None else x.new_empty(num_tokens, columns) if out is None else out
    if target.stride(1) != 1:
        raise ValueError(f"the result has strides {target.stride()}: give rows whose columns lie side by side")
    block_k = _largest_step(options["BLOCK_K"], depth)
    if method is Method.FEW_TOKENS:
        stream_weight(
            *(x, weight, target),
            bias=bias,
            norm=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            activation=activation,
            add=add_to is not None,
            BLOCK_N=options["BLOCK_N"] // 2 if gated else options["BLOCK_N"],
            BLOCK_K=block_k,
            PRELOAD=options["PRELOAD"] * options["BLOCK_K"] // block_k,
            PREFETCH=options["PREFETCH"],
            num_warps=options["num_warps"],
        )
        return target
    if norm is not None:
        x = norm(x)
    multiply_tiles(
        *(x, weight, target),
        bias=bias,
        activation=activation,
        add=add_to is not None,
        TOKENS=min(options["TOKENS"], max(SMALLEST_TILE, triton.next_power_of_2(num_tokens))),
        BLOCK_N=options["BLOCK_N"] // 2 if gated else options["BLOCK_N"],
        BLOCK_K=block_k,
        SPLIT=_largest_step(options["SPLIT"], depth // block_k),
        PREFETCH=options["PREFETCH"],
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
    )
    return target


def options_for(num_tokens: int, columns: int, depth: int, device: torch.device, *, gated: bool) -> tuned.Options:
    """Return the options. Token counts with the same next power of two share them, so that few kernels are compiled."""
    if num_tokens > MANY_TOKENS:
        return UNTUNED_MANY
    key = tuning_key(triton.next_power_of_2(num_tokens), columns, depth, gated=gated)
    return tuned.config("linear", device, key, UNTUNED_FEW if num_tokens <= MAX_TOKENS else UNTUNED_MANY)


def tuning_key(tokens: int, columns: int, depth: int, *, gated: bool) -> tuned.Key:
    return {"op": "gated" if gated else "linear", "tokens": tokens, "columns": columns, "depth": depth}


def fitting_method(options: tuned.Options, x: Tensor, weight: Tensor) -> Method:
    """Return the options' method if it supports these operands, else LIBRARY.

    The options may have been tuned for another, similar shape.
    """
    method = Method(options["method"])
    if x.dtype != weight.dtype or x.stride(1) != 1 or not weight.is_contiguous() or x.shape[1] % NARROWEST_STEP:
        return Method.LIBRARY
    if method is Method.FEW_TOKENS and x.shape[0] > MAX_TOKENS:
        return Method.LIBRARY
    if method is Method.TILES and x.dtype.itemsize != 2:  # the tensor cores would round float32
        return Method.LIBRARY
    return method


def _largest_step(most: int, whole: int) -> int:
    """Return the largest power of two up to `most`, itself a power of two, that divides `whole`."""
    return min(most, whole & -whole)


def _library(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: RowNorm | None,
    add_to: Tensor | None,
    out: Tensor | None,
    activation: Activation | Pointwise | None,
) -> Tensor:
    if norm is not None:
        x = norm(x)
    if isinstance(activation, Activation):
        return activation_and_mul(functional.linear(x, weight, bias), activation, out)
    if activation is not None:
        product = activate_each(functional.linear(x, weight, bias), activation)
        return product if out is None else out.copy_(product)
    if add_to is not None:
        if bias is not None:
            return add_to.add_(functional.linear(x, weight, bias))
        return add_to.addmm_(x, weight.T)
    if out is None:
        return functional.linear(x, weight, bias)
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)

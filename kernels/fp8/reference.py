"""Reference of FP8 linear layers, and of the quantization of their inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm.reference import rms_norm

from .weight import BLOCK, Fp8Weight, scale_for


def linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `norm(x) @ weight.T + bias` with x in 8 bits. Sums are float32 (float64 if x is), rounded once."""
    dtype = x.dtype
    compute_dtype = torch.promote_types(dtype, torch.float32)
    if norm is not None:
        normed = rms_norm(x.to(compute_dtype), norm.weight.to(compute_dtype), norm.eps)
        assert isinstance(normed, Tensor)
        x = normed
    quantized, scale = quantize(x, BLOCK if weight.in_blocks else x.shape[1])
    result = dequantize(quantized, scale).to(compute_dtype) @ weight.dequantize(compute_dtype).T
    if bias is not None:
        result = result + bias.to(compute_dtype)
    if add_to is not None:
        return add_to.copy_(result + add_to)
    return result.to(dtype) if out is None else out.copy_(result)


def quantize(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] to E4M3, with float32 scales [K / group, T], one per `group` consecutive values of a token.

    Tokens are the last dimension of scales, because kernels for many tokens read the scales of one group together.
    """
    groups = x.float().unflatten(1, (-1, group))
    scale = scale_for(groups.abs().amax(2))
    return (groups / scale[:, :, None]).flatten(1).to(torch.float8_e4m3fn), scale.T.contiguous()


def dequantize(quantized: Tensor, scale: Tensor) -> Tensor:
    """Return [T, K] float32 of the result of `quantize`."""
    num_tokens = quantized.shape[0]
    return (quantized.float().view(num_tokens, scale.shape[0], -1) * scale.T[:, :, None]).flatten(1)

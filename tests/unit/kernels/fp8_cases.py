"""Inputs for the tests of 8-bit linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.fp8 import BLOCK, Fp8Weight, quantize_weight

LARGEST = 448.0


def random_weight(rows: int, depth: int, *, in_blocks: bool, device: torch.device | str = "cpu") -> Fp8Weight:
    """Return a weight whose rows and blocks differ in magnitude, so that a wrong scale is noticed."""
    sizes = torch.rand(rows, 1, device=device) + 0.1
    return quantize_weight(torch.randn(rows, depth, device=device) * sizes, in_blocks=in_blocks)


def exact_input(num_tokens: int, depth: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return x [T, K] that FP8 holds without rounding: E4M3 values, the largest too, times a power of two per group.

    Triton's interpreter rounds to E4M3 wrongly where a mantissa carries over, so values must need no rounding there.
    """
    bits = torch.randint(0, 0x7F, (num_tokens, depth), dtype=torch.uint8)
    values = bits.view(torch.float8_e4m3fn).float() * (1 - 2 * torch.randint(2, (num_tokens, depth)))
    values.view(num_tokens, -1, group)[:, :, 3] = LARGEST
    powers = 2.0 ** torch.randint(-12, -7, (num_tokens, depth // group, 1))
    return (values.view(num_tokens, -1, group) * powers).view(num_tokens, depth).to(device, dtype)


def group_of(weight: Fp8Weight) -> int:
    """Return how many values of a token share a scale."""
    return BLOCK if weight.in_blocks else weight.shape[1]

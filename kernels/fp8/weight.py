"""FP8 weights and their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # number of rows and columns of a weight, or of values of a token, that share a scale
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [N, K] in E4M3. Value = data * scale."""

    data: Tensor  # [N, K] float8_e4m3fn
    scale: Tensor  # float32: [N], or [ceil(N / 128), K / 128]

    def __post_init__(self) -> None:
        """Raise `ValueError` if the shapes of data and scale do not match: kernels would read out of bounds."""
        rows, depth = self.data.shape
        allowed = [(rows,), *([(-(-rows // BLOCK), depth // BLOCK)] if depth % BLOCK == 0 else [])]
        if tuple(self.scale.shape) not in allowed:
            raise ValueError(f"scales {list(self.scale.shape)} of a weight {[rows, depth]}: give one of {allowed}")
        if self.data.dtype != torch.float8_e4m3fn or self.scale.dtype != torch.float32:
            raise ValueError(f"{self.data.dtype} with scales in {self.scale.dtype}: give float8_e4m3fn and float32")
        if not self.data.is_contiguous() or not self.scale.is_contiguous():
            raise ValueError("data and scales must be contiguous")

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        return self.data.shape[0], self.data.shape[1]

    @property
    def in_blocks(self) -> bool:
        """True if there is a scale per block of 128 x 128, false if per row."""
        return self.scale.dim() == 2

    @property
    def scaled_by(self) -> str:
        """The granularity of scales: "blocks" or "rows"."""
        return "blocks" if self.in_blocks else "rows"

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in this dtype."""
        return dequantize(self.data, self.scale, dtype)


def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply `data` [N, K] by its scales, per row [N] or per block [ceil(N / 128), ceil(K / 128)], for any K.

    Raises `ValueError` for scales of another shape.
    """
    rows, depth = data.shape
    blocks = (-(-rows // BLOCK), -(-depth // BLOCK))
    if scale.shape not in ((rows,), blocks):
        raise ValueError(f"scales {list(scale.shape)} of a weight {[rows, depth]}: give {[rows]} or {list(blocks)}")
    if scale.dim() == 1:
        return (data.float() * scale[:, None]).to(dtype)
    whole = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :depth]
    return (data.float() * whole).to(dtype)


def quantize_weight(weight: Tensor, *, in_blocks: bool) -> Fp8Weight:
    """Quantize `weight` [N, K] to E4M3: the largest value of a row or block becomes the largest of the format.

    Raises `ValueError` with blocks if K is not a multiple of 128.
    """
    rows, depth = weight.shape
    values = weight.float()
    if not in_blocks:
        scale = scale_for(values.abs().amax(1))
        return Fp8Weight((values / scale[:, None]).to(torch.float8_e4m3fn), scale)
    if depth % BLOCK:
        raise ValueError(f"blocks of {BLOCK} over a weight {[rows, depth]}: give a depth that is a multiple")
    filled = torch.nn.functional.pad(values, (0, 0, 0, -rows % BLOCK))
    blocks = filled.view(-1, BLOCK, depth // BLOCK, BLOCK)
    scale = scale_for(blocks.abs().amax((1, 3)))
    data = (blocks / scale[:, None, :, None]).view(-1, depth)[:rows]
    return Fp8Weight(data.to(torch.float8_e4m3fn).contiguous(), scale)


def scale_for(largest: Tensor) -> Tensor:
    """Return the scale that maps `largest` to the largest value of the format; 1 if `largest` is 0."""
    return torch.where(largest > 0, largest / LARGEST, 1.0)

"""Weights of linear layers that stay in 8 bits, and those that come in 8 bits to a layer that computes otherwise.

checkpoint                         parameter                        kernels
weight            [N, K] E4M3      weight [N, K] E4M3         ─┐
weight_scale(_inv) one a block     scales [N / 128, K / 128]  ─┼──> Fp8Weight
                   one a row, or   scales [N]                 ─┘
                   one in all
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.models.errors import WeightsError
from baton.engine.models.quantization import Quantization
from baton.kernels.fp8 import BLOCK, dequantize

from .base import Layer, Parameter, Slot, join
from .linear import Linear

E4M3 = torch.float8_e4m3fn


class BlockScales(Parameter):
    """One of each block of 128 x 128 of a weight [N, K]."""

    def __init__(self, rows: int, depth: int) -> None:
        super().__init__(-(-rows // BLOCK), depth // BLOCK, typical=1.0, dtype=torch.float32)

    def slot(self, name: str, start: int = 0, rows: int | None = None) -> Slot:
        return Slot(name, self, start // BLOCK, None if rows is None else -(-rows // BLOCK))


class RowScales(Parameter):
    """One of each row of a weight."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows, typical=1.0, dtype=torch.float32)

    def slot(self, name: str, start: int = 0, rows: int | None = None) -> Slot:
        return _RowScalesSlot(name, self, start, rows)


class ScalarScale(RowScales):
    """One of everything."""

    def __init__(self) -> None:
        super().__init__(1)


class _RowScalesSlot(Slot):
    """In a checkpoint a column of them, or one for all rows."""

    __slots__ = ()

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return shape in (self.shape, (*self.shape, 1), (1,), ())

    def place(self, tensor: Tensor) -> None:
        if not self.accepts(tuple(tensor.shape)):
            raise WeightsError(f"{self.name} has shape {list(tensor.shape)}, must have {list(self.shape)} or one value")
        super().place(tensor.reshape(-1).expand(self.shape))


@dataclass(frozen=True)
class Fp8Format:
    """What a linear layer's weight is made of instead of a plain matrix."""

    quantization: Quantization

    @property
    def scale_name(self) -> str:
        return self.quantization.scale_name

    def parameters(self, rows: int, depth: int) -> tuple[Parameter, Parameter]:
        """Of a weight [N, K] and its scales."""
        scales = BlockScales(rows, depth) if self.quantization.in_blocks else RowScales(rows)
        return Parameter(rows, depth, dtype=E4M3), scales

    def fits(self, depth: int, parts: list[int]) -> bool:
        """Whether layers of these numbers of rows can share a weight: no block may belong to two of them."""
        return not self.quantization.in_blocks or all(size % BLOCK == 0 for size in (depth, *parts[:-1]))


def keep_in_8_bits(model: Layer, quantization: Quantization, is_quantized: Callable[[str], bool]) -> None:
    """Gives the linear layers of `model` that come in 8 bits the format for it, before anything is allocated.

    `is_quantized` tells by a layer's name in the checkpoint. Layers that were merged of both kinds stay plain.
    """
    chosen = Fp8Format(quantization)
    for path, layer in linear_layers(model):
        parts = layer.parts_at(path)
        if all(is_quantized(name) for name in parts) and chosen.fits(layer.in_features, list(parts.values())):
            layer.take_format(chosen)


def linear_layers(layer: Layer, path: str = "") -> list[tuple[str, Linear]]:
    """All below `layer`, by path."""
    found = [(path, layer)] if isinstance(layer, Linear) else []
    for name, child in layer.children():
        found += linear_layers(child, join(path, name))
    return found


def plain_weight(data: Tensor, scale: Tensor, in_blocks: bool, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] that E4M3 `data` and the checkpoint's `scale` stand for, for a layer that takes no 8 bits.

    Raises `WeightsError` where they do not belong together.
    """
    if not in_blocks and scale.numel() in (1, len(data)):
        scale = scale.reshape(-1).expand(len(data))
    try:
        return dequantize(data, scale.float(), dtype)
    except ValueError as error:
        raise WeightsError(str(error)) from error

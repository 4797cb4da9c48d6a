"""Weights of linear layers that stay in 8 bits, and those that come in 8 bits to a layer that computes otherwise.

checkpoint                         parameter                        kernels
weight            [N, K] E4M3      weight [N, K] E4M3         ─┐
weight_scale(_inv) one a block     scales [N / 128, K / 128]  ─┼──> Fp8Weight
                   one a row, or   scales [N]                 ─┘
                   one in all
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.hf_config.errors import WeightsError
from baton.engine.hf_config.quantization import Quantization
from baton.kernels.fp8 import BLOCK, dequantize

from .base import Parameter, Share, Slot

E4M3 = torch.float8_e4m3fn


class BlockScales(Parameter):
    """One of each block of 128 x 128 of a weight [N, K]."""

    def __init__(self, rows: Share, columns: Share) -> None:
        kept = _blocks_of(rows), _blocks_of(columns)
        super().__init__(*(share.whole for share in kept), typical=1.0, dtype=torch.float32)
        for dimension, share in enumerate(kept):
            self.keep(dimension, share)

    def slot(self, name: str, start: int = 0, rows: Share | None = None) -> Slot:
        return Slot(name, self, start // BLOCK, None if rows is None else _blocks_of(rows))


def _blocks_of(share: Share) -> Share:
    """The blocks of 128 that a share of values is made of."""
    first = share.start // BLOCK
    return Share(first, -(-share.end // BLOCK) - first, -(-share.whole // BLOCK))


class RowScales(Parameter):
    """One of each row of a weight."""

    def __init__(self, rows: Share) -> None:
        super().__init__(rows.whole, typical=1.0, dtype=torch.float32)
        self.keep(0, rows)

    def slot(self, name: str, start: int = 0, rows: Share | None = None) -> Slot:
        return _RowScalesSlot(name, self, start, rows)


class ScalarScale(RowScales):
    """One of everything."""

    def __init__(self) -> None:
        super().__init__(Share.all(1))


class _RowScalesSlot(Slot):
    """In a checkpoint a column of them, or one for all rows."""

    __slots__ = ()

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return shape in (self.shape, (*self.shape, 1), (1,), ())

    def index(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return super().index(shape)[:1] if shape and shape[0] == self.shape[0] else ()

    def place(self, tensor: Tensor) -> None:
        if tuple(tensor.shape) in (self.share_shape, (*self.share_shape, 1)):
            self._place(tensor.reshape(-1))
            return
        if not self.accepts(tuple(tensor.shape)):
            raise WeightsError(f"{self.name} has shape {list(tensor.shape)}, must have {list(self.shape)} or one value")
        self._place(tensor.reshape(-1).expand(self.shape)[self.shares[0].slice])


@dataclass(frozen=True)
class Fp8Format:
    """The format of a weight of a linear layer or of experts that is 8-bit codes and scales, not a plain matrix."""

    quantization: Quantization

    @property
    def scale_name(self) -> str:
        return self.quantization.scale_name

    @property
    def in_blocks(self) -> bool:
        return self.quantization.in_blocks

    def parameters(self, rows: Share, columns: Share) -> tuple[Parameter, Parameter]:
        """Return the parameters for a share of a weight [N, K] and its scales."""
        scales = BlockScales(rows, columns) if self.quantization.in_blocks else RowScales(rows)
        weight = Parameter(rows.whole, columns.whole, dtype=E4M3)
        weight.keep(0, rows)
        weight.keep(1, columns)
        return weight, scales

    def fits(self, depth: int, parts: list[int]) -> bool:
        """Return whether layers of these numbers of rows can share a weight: no block belongs to two of them."""
        return not self.quantization.in_blocks or all(size % BLOCK == 0 for size in (depth, *parts[:-1]))

    def divides(self, columns: Share, parts: list[Share]) -> bool:
        """Return whether no block belongs to two ranks."""
        borders = [border for share in (columns, *parts) for border in (share.start, share.end) if border < share.whole]
        return not self.quantization.in_blocks or all(border % BLOCK == 0 for border in borders)


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

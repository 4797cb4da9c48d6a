"""Operands of linear layers: packed weights, and the RMSNorm of the input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.kernels.rms_norm import rms_norm

from . import cpu


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm of each row before a product: see `baton.kernels.rms_norm`."""

    weight: Tensor  # [K]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x [T, K] in a separate kernel; the result has x's shape."""
        normed = rms_norm(x, self.weight, self.eps)
        assert isinstance(normed, Tensor)
        return normed


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in a form for `linear` only: `data` is panels (see `native/linear.cpp`), or the weight itself."""

    data: Tensor
    shape: tuple[int, int]  # N, K
    in_panels: bool


def pack(weight: Tensor) -> PackedWeight:
    """Return a copy of `weight` [N, K] for `linear`, or `weight` itself if torch is best for its device and dtype.

    `weight` is unchanged. Free it afterwards, unless something else (an embedding) reads it.
    """
    shape = (weight.shape[0], weight.shape[1])
    panels = cpu.pack(weight) if weight.device.type == "cpu" else None
    return PackedWeight(weight if panels is None else panels, shape, in_panels=panels is not None)

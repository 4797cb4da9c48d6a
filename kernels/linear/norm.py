"""A norm that belongs to the layer behind it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.kernels.rms_norm import rms_norm


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm of each row before a product: see `baton.kernels.rms_norm`."""

    weight: Tensor  # [K]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> the same shape, by a kernel of its own."""
        normed = rms_norm(x, self.weight, self.eps)
        assert isinstance(normed, Tensor)
        return normed

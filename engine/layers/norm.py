"""RMSNorm (arXiv:1910.07467)."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm import rms_norm

from .base import Layer, Parameter


class RMSNorm(Layer):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = Parameter(size, typical=1.0)
        self.eps = eps

    @property
    def of_rows(self) -> RowNorm:
        """This norm, for a linear layer to begin with."""
        return RowNorm(self.weight.data, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        out = rms_norm(x, self.weight.data, self.eps)
        assert isinstance(out, Tensor)
        return out

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual) in one pass."""
        normed, total = rms_norm(x, self.weight.data, self.eps, residual)
        return normed, total

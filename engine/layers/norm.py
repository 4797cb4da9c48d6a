"""RMSNorm (arXiv:1910.07467)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.parallel.groups import Group
from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm import rms_norm

from .base import Layer, Parameter, Share, Slot


class RMSNorm(Layer):
    """x / rms(x) * (offset + weight) over the last dimension.

    With an offset, `weight` holds the sum, in float32: the model's type would round it, and products then have no
    addition to make.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.weight = OffsetParameter(size, offset=offset) if offset else Parameter(size, typical=1.0)
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


class OffsetParameter(Parameter):
    """The sum of what a checkpoint stores and `offset`, in float32."""

    __slots__ = ("offset",)

    def __init__(self, size: int, *, offset: float) -> None:
        super().__init__(size, dtype=torch.float32)
        self.offset = offset

    def slot(self, name: str, start: int = 0, rows: Share | None = None) -> Slot:
        return _OffsetSlot(name, self, start, rows)


class _OffsetSlot(Slot):
    __slots__ = ()

    def _place(self, share: Tensor) -> None:
        assert isinstance(self.parameter, OffsetParameter)
        super()._place(share.float() + self.parameter.offset)


def norms_over_ranks(parts: Sequence[tuple[RMSNorm, Tensor]], group: Group) -> list[Tensor]:
    """Normalize tensors [T, N] each by its norm, over widths of which every rank of the group holds an equal part.

    Parts that several ranks hold count as often, so that they do not change the mean. One all-reduce for all tensors.
    """
    if group.size == 1:
        return [norm(x) for norm, x in parts]
    means = torch.stack([x.float().square().mean(-1) for _, x in parts])
    means = group.all_reduce(means) / group.size
    return [
        (x.float() * torch.rsqrt(mean[:, None] + norm.eps) * norm.weight.data.float()).to(x.dtype)
        for (norm, x), mean in zip(parts, means, strict=True)
    ]

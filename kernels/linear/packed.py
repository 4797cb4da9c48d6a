"""Weights in the order in which the kernels of their device read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from . import cpu


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] for `linear` alone: `data` is in panels (see `native/linear.cpp`), or the weight itself."""

    data: Tensor
    shape: tuple[int, int]  # N, K
    in_panels: bool


def pack(weight: Tensor) -> PackedWeight:
    """A copy of `weight` [N, K] for `linear`, or `weight` itself where its device and type are best served by torch.

    `weight` is left as it is. Drop it afterwards, unless something else (an embedding) reads it.
    """
    shape = (weight.shape[0], weight.shape[1])
    panels = cpu.pack(weight) if weight.device.type == "cpu" else None
    return PackedWeight(weight if panels is None else panels, shape, in_panels=panels is not None)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [T, K], weight [N, K], bias [N] -> [T, N], all of one type; sums in float32.

    In panels, a row of the result is bitwise the same whatever the other rows are and however many. Elsewhere torch
    chooses its algorithm by T, and the last bits may depend on it.
    """
    if weight.in_panels:
        return cpu.linear(x, weight.data, weight.shape, bias)
    return functional.linear(x, weight.data, bias)

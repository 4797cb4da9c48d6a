"""Weights in the order in which the kernels of their device read them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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

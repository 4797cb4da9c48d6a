"""Experts in 4 bits (MXFP4), dequantized while they are loaded.

    <name>_blocks  [items, rows, groups, 16] bytes: 32 neighbours of a row, two per byte, the first in the low half
    <name>_scales  [items, rows, groups] bytes: a power of two for each 32 values

A value has a sign, two bits of exponent and one of mantissa (E2M1). A scale is an exponent with bias 127 (E8M0).
Source: OCP Microscaling Formats 1.0, section 5.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from .base import Held, Parameter, Share, Slot, StackSlot, join
from .method import ExpertsShape
from .plain_experts import FusedMethod

GROUP = 32  # values of a row that share a scale
SCALE_BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 magnitudes, indexed by the three bits below the sign


class Mxfp4Experts(FusedMethod):
    """Matrices in the model's dtype, stored as blocks and scales, with rows of gates and ups interleaved."""

    def slots(self, shape: ExpertsShape, parameters: Mapping[str, Parameter], path: str) -> Iterator[Slot]:
        for name, parameter in (("gate_up_proj", parameters["gate_up"]), ("down_proj", parameters["down"])):
            yield from packed_slots(join(path, name), parameter, shape.held)


def packed_slots(name: str, parameter: Parameter, held: Held) -> Iterator[PackedSlot]:
    """Yield the slots of a parameter [items, rows, columns] that a checkpoint stores as blocks and scales."""
    halves: dict[str, Tensor] = {}
    for which in ("blocks", "scales"):
        yield PackedSlot(name, which, parameter, held, halves)


class PackedSlot(StackSlot):
    """Loads the blocks or the scales of a weight. Once both have arrived, in any order, the weight is dequantized."""

    __slots__ = ("_halves", "_which")

    stored_as = ("U8",)

    def __init__(self, name: str, which: str, parameter: Parameter, held: Held, halves: dict[str, Tensor]) -> None:
        super().__init__(f"{name}_{which}", parameter, held)
        items, rows, columns = self.shares
        first = columns.start // GROUP
        groups = Share(first, -(-columns.end // GROUP) - first, -(-columns.whole // GROUP))
        within = (Share.all(GROUP // 2),) if which == "blocks" else ()
        self.shares = (items, rows, groups, *within)
        self._which = which
        self._halves = halves  # this weight's blocks and scales, until both have arrived

    def num_bytes(self, dtype: torch.dtype) -> int:
        return self.num_elements

    def _place(self, share: Tensor) -> None:
        self._halves[self._which] = share.to(self.parameter.data.device)
        if len(self._halves) < 2:
            return
        columns = self.parameter.shares[2]
        first = columns.start % GROUP
        for target, index in zip(self.parameter.data, self._held.items, strict=True):
            place = index - self._held.share.start
            values = dequantize(self._halves["blocks"][place], self._halves["scales"][place], target.dtype)
            target.copy_(values[:, first : first + columns.size])
        self._halves.clear()


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values [rows, 32 * groups] of blocks uint8 [rows, groups, 16] and scales uint8 [rows, groups].

    The result is exact, except for values that `dtype` cannot represent.
    """
    exact = torch.float32 if dtype == torch.float16 else dtype  # a dtype with the exponent range of the scales
    values = functional.embedding(blocks.int(), _pairs(exact, blocks.device)).flatten(2)  # [rows, groups, 32]
    powers = torch.ldexp(torch.ones_like(scales, dtype=exact), scales.int() - SCALE_BIAS)
    return values.mul_(powers[..., None]).flatten(1).to(dtype)


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table [256, 2] of the two values in each byte."""
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=1)

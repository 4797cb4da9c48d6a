"""Random weights for trying and measuring without a checkpoint: equal for equal seeds, made at the speed of memory."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from baton.engine.layers.base import Slot

SPREAD = 0.02  # standard deviation, as models are initialized
_BANK_SIZE = 1_048_573  # prime, so that no matrix has equal rows


class DummyWeights:
    """Every tensor is a stretch of one bank of normal numbers, from a place that its name gives, round and round.

    So a share of a tensor is the same whatever the others are: a model is the same over any number of ranks.
    """

    def __init__(self, seed: int, device: torch.device | str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._bank = (torch.randn(_BANK_SIZE, generator=generator) * SPREAD).to(device, dtype)

    def tensor(self, slot: Slot) -> Tensor:
        """Return the slot's share of a tensor of its shape, around the typical value of its parameter."""
        rows, *others = slot.shares
        width = math.prod(share.whole for share in others)
        size = rows.size * width
        start = (zlib.crc32(slot.name.encode()) + rows.start * width) % _BANK_SIZE
        rounds = -(-(start + size) // _BANK_SIZE)
        values = self._bank.repeat(rounds)[start : start + size].view(rows.size, *(share.whole for share in others))
        values = values[(slice(None), *(share.slice for share in others))]
        return values + slot.parameter.typical if slot.parameter.typical else values

"""The definition, in plain torch: of every rank's input, what every rank has afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def all_reduce(inputs: Sequence[Tensor]) -> Tensor:
    """The sum of all inputs, in float32 and in rank order, rounded once. The same on every rank."""
    total = inputs[0].to(torch.promote_types(inputs[0].dtype, torch.float32))
    for x in inputs[1:]:
        total = total + x
    return total.to(inputs[0].dtype)


def all_gather(inputs: Sequence[Tensor]) -> Tensor:
    """All inputs in rank order; two negative zeros in one word of 32 bits become zeros. The same on every rank."""
    gathered = torch.cat(list(inputs))
    words = gathered.view(-1).view(torch.int32)
    words.masked_fill_((words & 0xFFFFFFFF) == 0x80008000, 0)
    return gathered


def reduce_scatter(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The parts of the sum, in rank order: one for each rank."""
    return list(all_reduce(inputs).chunk(len(inputs)))

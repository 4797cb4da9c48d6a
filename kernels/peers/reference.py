"""The definition, in plain torch: of every rank's input, what every rank has afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.locate import ExpertTable, locate

from .tokens import Brought, PlacesOfRanks, Routed


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


def dispatch(given: Sequence[Routed], table: ExpertTable, places: PlacesOfRanks) -> list[Brought]:
    """What each rank has of all ranks' tokens; rows that do not come are zeros. All tokens add to `table.loads`."""
    hidden, weights = all_gather([each.hidden for each in given]), torch.cat([each.weights for each in given])
    expert_ids = torch.cat([each.expert_ids for each in given])
    size, num_tokens = len(given), len(given[0].hidden)
    own = [range(rank * num_tokens, (rank + 1) * num_tokens) for rank in range(size)]
    ids = [locate(expert_ids, table, places=places.of(rank), counted=own[rank]) for rank in range(size)]
    came = torch.stack([(each >= 0).any(1).view(size, num_tokens) for each in ids])  # [to, from, token]
    return [
        Brought(
            hidden=hidden.masked_fill(~came[rank].view(-1, 1), 0),
            expert_ids=ids[rank],
            weights=weights,
            visits=torch.stack((came[rank], came[:, rank])).int(),
        )
        for rank in range(size)
    ]


def combine(partials: Sequence[Tensor], visits: Sequence[Tensor]) -> list[Tensor]:
    """What `reduce_scatter` gives where rows that did not come to a rank are zeros, one for each rank."""
    pairs = zip(partials, visits, strict=True)
    return reduce_scatter([partial.masked_fill(came[0].view(-1, 1) == 0, 0) for partial, came in pairs])

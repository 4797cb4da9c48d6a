"""Reference of the collectives: computes every rank's output from every rank's input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.expert_map import ExpertMap, map_experts

from .token_exchange import DispatchedTokens, RankSlots, RoutedTokens


def all_reduce(inputs: Sequence[Tensor]) -> Tensor:
    """Return the sum of all inputs, in float32 and in rank order, rounded once. The same on every rank."""
    total = inputs[0].to(torch.promote_types(inputs[0].dtype, torch.float32))
    for x in inputs[1:]:
        total = total + x
    return total.to(inputs[0].dtype)


def all_gather(inputs: Sequence[Tensor]) -> Tensor:
    """Concatenate all inputs in rank order; two negative zeros in one 32-bit word become zeros. Equal on all ranks."""
    gathered = torch.cat(list(inputs))
    words = gathered.view(-1).view(torch.int32)
    words.masked_fill_((words & 0xFFFFFFFF) == 0x80008000, 0)
    return gathered


def reduce_scatter(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of the sum in rank order, one for each rank."""
    return list(all_reduce(inputs).chunk(len(inputs)))


def dispatch(given: Sequence[RoutedTokens], table: ExpertMap, places: RankSlots) -> list[DispatchedTokens]:
    """Return each rank's tokens; rows that are not sent to it are zeros. All tokens add to the loads of `table`."""
    hidden, weights = all_gather([each.hidden for each in given]), torch.cat([each.weights for each in given])
    expert_ids = torch.cat([each.expert_ids for each in given])
    size, num_tokens = len(given), len(given[0].hidden)
    own = [range(rank * num_tokens, (rank + 1) * num_tokens) for rank in range(size)]
    ids = [map_experts(expert_ids, table, places=places.of(rank), counted=own[rank]) for rank in range(size)]
    came = torch.stack([(each >= 0).any(1).view(size, num_tokens) for each in ids])  # [to, from, token]
    return [
        DispatchedTokens(
            hidden=hidden.masked_fill(~came[rank].view(-1, 1), 0),
            expert_ids=ids[rank],
            weights=weights,
            visits=torch.stack((came[rank], came[:, rank])).int(),
        )
        for rank in range(size)
    ]


def combine(partials: Sequence[Tensor], visits: Sequence[Tensor]) -> list[Tensor]:
    """Return `reduce_scatter` with rows that were not sent to a rank as zeros, one result for each rank."""
    pairs = zip(partials, visits, strict=True)
    return reduce_scatter([partial.masked_fill(came[0].view(-1, 1) == 0, 0) for partial, came in pairs])

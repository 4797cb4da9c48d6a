"""`ExpertMap`, and the reference of its look-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertMap:
    """The places of each of E experts, which may have several replicas.

    It is changed in place, so that captured graphs see the changes.
    """

    places: Tensor  # [E, most replicas] int32: the first counts[e] entries of row e are valid
    counts: Tensor  # [E] int32, at least 1
    loads: Tensor  # [E] int64: tokens that each expert got since its load was last set to 0

    @classmethod
    def empty(cls, num_experts: int, most_replicas: int, device: torch.device | str) -> ExpertMap:
        """Return a map to be filled by `write`, with all loads 0."""
        return cls(
            places=torch.zeros(num_experts, most_replicas, dtype=torch.int32, device=device),
            counts=torch.ones(num_experts, dtype=torch.int32, device=device),
            loads=torch.zeros(num_experts, dtype=torch.int64, device=device),
        )

    def write(self, places: Sequence[Sequence[int]]) -> None:
        """Set the places of every expert: expert e lies at each of `places[e]`."""
        most = self.places.shape[1]
        rows = [[*row, *[row[0]] * (most - len(row))] for row in places]
        self.places.copy_(torch.tensor(rows, dtype=torch.int32))
        self.counts.copy_(torch.tensor([len(row) for row in places], dtype=torch.int32))


def map_experts(expert_ids: Tensor, table: ExpertMap, places: range, counted: range) -> Tensor:
    """See `baton.kernels.expert_map.map_experts`."""
    known = (expert_ids >= 0) & (expert_ids < len(table.counts))
    ids = expert_ids.where(known, 0).long()
    tokens = torch.arange(len(expert_ids), device=expert_ids.device)[:, None]
    place = table.places[ids, tokens % table.counts[ids]] - places.start
    rows = slice(counted.start, counted.stop)
    own = ids[rows][known[rows]]
    table.loads.index_add_(0, own, torch.ones_like(own))
    return place.masked_fill(~known | (place < 0) | (place >= len(places)), -1)

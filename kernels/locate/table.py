"""Where the replicas of each expert lie, on the device. Written in place, so that captured steps see what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertTable:
    """Of E experts, each in one place or several."""

    places: Tensor  # [E, most replicas] int32, of which the first `counts` of each row count
    counts: Tensor  # [E] int32, at least 1
    loads: Tensor  # [E] int64: tokens that went to each expert since it was last set to 0

    @classmethod
    def empty(cls, num_experts: int, most_replicas: int, device: torch.device | str) -> ExpertTable:
        """To be filled by `write`; nothing is counted yet."""
        return cls(
            places=torch.zeros(num_experts, most_replicas, dtype=torch.int32, device=device),
            counts=torch.ones(num_experts, dtype=torch.int32, device=device),
            loads=torch.zeros(num_experts, dtype=torch.int64, device=device),
        )

    def write(self, places: Sequence[Sequence[int]]) -> None:
        """From now on expert e lies at each of `places[e]`."""
        most = self.places.shape[1]
        rows = [[*row, *[row[0]] * (most - len(row))] for row in places]
        self.places.copy_(torch.tensor(rows, dtype=torch.int32))
        self.counts.copy_(torch.tensor([len(row) for row in places], dtype=torch.int32))

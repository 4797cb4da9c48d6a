"""Tokens whose experts are on other ranks, with even and uneven loads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.parallel.placement import ExpertPlacement
from baton.kernels.expert_map import ExpertMap
from baton.kernels.p2p import DispatchedTokens, PeerMemory, RankSlots, RoutedTokens, reference
from baton.kernels.p2p.options import Algorithm

gpu: Any = pytest.importorskip("baton.kernels.p2p.gpu")

EXPERTS, TOP_K = 16, 3


class Load(StrEnum):
    RANDOM = "random"
    ONE_RANK = "all to the last rank"
    NOT_ONE = "none to rank 1"
    PADDED = "padding behind tokens, and nothing but padding on rank 0"
    NOBODY = "nothing but padding"


@dataclass(frozen=True)
class Exchange:
    """A dispatch of all ranks' tokens to experts, and the combine of the outputs."""

    load: Load
    num_tokens: int
    hidden_size: int = 72
    replicas: int = 0
    seed: int = 0

    def placement(self, ranks: int) -> ExpertPlacement:
        return ExpertPlacement.initial(EXPERTS, self.replicas, ranks)

    def table(self, ranks: int, device: torch.device) -> ExpertMap:
        placement = self.placement(ranks)
        table = ExpertMap.empty(EXPERTS, placement.most_replicas, device)
        table.write(placement.replicas())
        return table

    def places(self, ranks: int) -> RankSlots:
        slots = self.placement(ranks).slots
        return RankSlots(first=0, apart=slots, of_each=slots)

    def given(self, rank: int, ranks: int, dtype: torch.dtype, device: torch.device) -> RoutedTokens:
        """Return a rank's tokens. Some values are negative zeros, alone and in pairs."""
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        hidden = torch.randn(self.num_tokens, self.hidden_size, generator=generator).to(dtype)
        hidden[:, rank::7] = -0.0
        hidden[:, 4 * rank : 4 * rank + 3] = -0.0
        weights = torch.rand(self.num_tokens, TOP_K, generator=generator)
        ids = self._expert_ids(rank, ranks, generator)
        weights[ids < 0] = 0.0
        return RoutedTokens(hidden.to(device), ids.to(device), weights.to(device))

    def _expert_ids(self, rank: int, ranks: int, generator: torch.Generator) -> Tensor:
        allowed = torch.arange(EXPERTS)
        if self.load is Load.ONE_RANK:
            allowed = allowed[-EXPERTS // ranks :]
        elif self.load is Load.NOT_ONE:
            allowed = allowed[allowed // (EXPERTS // ranks) != 1]
        order = torch.rand(self.num_tokens, len(allowed), generator=generator).argsort(1)[:, :TOP_K]
        ids = allowed[order].int()
        if self.load is Load.PADDED:
            ids[0 if rank == 0 else self.num_tokens // 2 :] = -1
        return ids.fill_(-1) if self.load is Load.NOBODY else ids

    def run(
        self, rank: int, memory: PeerMemory, dtype: torch.dtype, block: int
    ) -> tuple[DispatchedTokens, Tensor, Tensor]:
        """Return the dispatched tokens, the combine of (rank + 1) times their values, and the uses of experts."""
        device = memory.addresses.device
        options = {"method": Algorithm.ONE_SHOT, "BLOCK": block}
        table = self.table(memory.size, device)
        given = self.given(rank, memory.size, dtype, device)
        brought = gpu.dispatch(given, table, self.places(memory.size), memory, options)
        back = gpu.combine(partial_of(brought, rank), brought.visits, memory, options)
        return brought, back, table.loads

    def expected(
        self, ranks: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[list[DispatchedTokens], list[Tensor], Tensor]:
        table = self.table(ranks, device)
        given = [self.given(rank, ranks, dtype, device) for rank in range(ranks)]
        brought = reference.dispatch(given, table, self.places(ranks))
        partials = [partial_of(each, rank) for rank, each in enumerate(brought)]
        return brought, reference.combine(partials, [each.visits for each in brought]), table.loads

    def __str__(self) -> str:
        return f"{self.num_tokens} of {self.hidden_size}, {self.load}, {self.replicas} replicas"


def partial_of(brought: DispatchedTokens, rank: int) -> Tensor:
    """Return the outputs of experts that multiply by (rank + 1), with NaN in rows without a token."""
    return (brought.hidden * (rank + 1)).masked_fill(brought.visits[0].view(-1, 1) == 0, float("nan"))


def differences(found: tuple[DispatchedTokens, Tensor, Tensor], expected: tuple[DispatchedTokens, Tensor]) -> list[str]:
    """Return the names of parts with different bits; the sign of a sum of zeros may differ."""
    (brought, back, _), (wanted, wanted_back) = found, expected
    came = wanted.visits[0].view(-1) != 0
    pairs = {
        "rows": (brought.hidden[came].view(torch.int16), wanted.hidden[came].view(torch.int16)),
        "ids": (brought.expert_ids, wanted.expert_ids),
        "weights": (brought.weights.view(torch.int32), wanted.weights.view(torch.int32)),
        "visits": (brought.visits, wanted.visits),
        "back": (back, wanted_back),
    }
    return [name for name, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)]

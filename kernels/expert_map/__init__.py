"""The expert map of expert parallelism: logical expert ids to the places of their replicas on this rank."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .reference import ExpertMap

__all__ = ["ExpertMap", "map_experts"]


def map_experts(expert_ids: Tensor, table: ExpertMap, *, places: range, counted: range) -> Tensor:
    """Map expert ids [T, K] int32 to their places among `places`: [T, K] int32.

    Numbers that are no expert's stand for none: -1, and what a collective leaves whose group has ended. The result
    counts from the start of `places`; -1 where the expert lies outside of them. Token t goes to replica
    t % (how many the expert has), so equal ids give equal places on every rank. Tokens `counted` add to `table.loads`.
    """
    if not expert_ids.is_cuda:
        return reference.map_experts(expert_ids, table, places, counted)
    from . import gpu

    return gpu.map_experts(expert_ids, table, places, counted)

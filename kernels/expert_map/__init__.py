"""The expert map of expert parallelism: maps logical expert ids to places of their replicas on this rank."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .reference import ExpertMap

__all__ = ["ExpertMap", "map_experts"]


def map_experts(expert_ids: Tensor, table: ExpertMap, *, places: range, counted: range) -> Tensor:
    """Map expert ids [T, K] int32 to their places among `places`: [T, K] int32.

    The result counts from the start of `places`; it is -1 if the expert's place is outside of them. Token t goes to
    replica t % (number of the expert's replicas), so that all ranks map equal ids to equal places. Tokens in the range
    `counted` are added to `table.loads`. Ids that are not an expert's stand for no expert: -1 for padding, and whatever
    a collective leaves behind after its group has ended.
    """
    if not expert_ids.is_cuda:
        return reference.map_experts(expert_ids, table, places, counted)
    from . import gpu

    return gpu.map_experts(expert_ids, table, places, counted)

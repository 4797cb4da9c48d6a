"""The definition, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .table import ExpertTable


def locate(expert_ids: Tensor, table: ExpertTable, places: range, counted: range) -> Tensor:
    """See `baton.kernels.locate.locate`."""
    known = (expert_ids >= 0) & (expert_ids < len(table.counts))
    ids = expert_ids.where(known, 0).long()
    tokens = torch.arange(len(expert_ids), device=expert_ids.device)[:, None]
    place = table.places[ids, tokens % table.counts[ids]] - places.start
    rows = slice(counted.start, counted.stop)
    own = ids[rows][known[rows]]
    table.loads.index_add_(0, own, torch.ones_like(own))
    return place.masked_fill(~known | (place < 0) | (place >= len(places)), -1)

"""Records of engine groups, without engines."""

from __future__ import annotations

from baton.cluster.contracts import EngineGroup

from ...helpers.fakes import make_record


def group_of(group_id: str, *, size: int, epoch: int = 1, rank: int = -1, first_rank: int = 0) -> EngineGroup:
    names = [group_id] if size == 1 else [f"{group_id}{index}" for index in range(size)]
    ranks = [rank + index if rank >= 0 else -1 for index in range(size)]
    engines = [make_record(engine_id=name, epoch=epoch, rank=rank) for name, rank in zip(names, ranks, strict=True)]
    return EngineGroup(group_id=group_id, first_rank=first_rank, engines=engines)

"""Engines as a router sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.cluster.cached_blocks import CachedBlocks
from baton.cluster.contracts import EngineRecord, EngineView, Role
from baton.engine.core.block_log import BlocksCached, GroupBlocks, HitRule, pack_names
from baton.engine.core.layout import BLOCK_SIZE, CHECKPOINT_TOKENS
from baton.engine.core.messages import EngineStats
from baton.engine.core.pace import StepTimes
from baton.engine.core.prefix import block_hashes
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

STATS = EngineStats(
    **{
        **dict.fromkeys(EngineStats.__struct_fields__, 0),
        "num_blocks": 1000,
        "num_blocks_free": 1000,
        "experts": None,
        "tiers": None,
        "step_times": StepTimes(),
    }
)


def view(
    rank: int,
    role: Role = Role.UNIFIED,
    *,
    fingerprint: str = "f",
    node: str = "n",
    outstanding: int = 0,
    cached: list[int] | None = None,
    host: list[int] | None = None,
    disk: list[int] | None = None,
    checkpoints: list[int] | None = None,
    salt: str = "",
    lanes: Sequence[PeerLane] = (),
    **stats: Any,
) -> EngineView:
    """Return an engine that has all blocks of the prompts `cached` in its prefix cache, `host` and `disk` in tiers.

    If `checkpoints` is given, some layers have a state, and the engine has all checkpoints of that prompt.
    """
    record = EngineRecord(
        engine_id=f"e{rank}",
        group_id=f"e{rank}",
        epoch=rank,
        role=role,
        rank=rank,
        node_id=node,
        node_ip="",
        pid=0,
        address="",
        kv_address="",
        fingerprint=fingerprint,
        model_id="m",
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        num_blocks=1000,
    )
    values = {name: getattr(STATS, name) for name in EngineStats.__struct_fields__} | stats
    blocks = CachedBlocks(1000, 1000)
    names = [pack_names(block_hashes(each or [], BLOCK_SIZE, salt)) for each in (cached, host, disk)]
    rules, groups = [], []
    if checkpoints is not None:
        span = CHECKPOINT_TOKENS // BLOCK_SIZE
        rules = [HitRule(), HitRule(checkpoint_blocks=span)]
        groups = [GroupBlocks(pack_names(block_hashes(checkpoints, BLOCK_SIZE, salt)[span - 1 :: span]))]
    blocks.apply(BlocksCached(0, *names, rules, groups))
    return EngineView(
        record, EngineStats(**values), outstanding, TransferStats(lanes=list(lanes)) if lanes else None, blocks
    )

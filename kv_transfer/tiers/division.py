"""The division of tiers between cache groups: each group has its own slots, of the size of its blocks.

    host_bytes    [ full: slots 0 ... 799 ][ window: 800 ... 899 ][ state: 900 ... 907 ]        as the arenas divide the
    disk_bytes    [ full: slots 0 ... 7999 ][ window: 8000 ... 8999 ][ state: 9000 ... 9079 ]   engine's memory

The slots of a tier are numbered through all groups, like the blocks of the pool. So orders and reports contain only
numbers, and look the same for models with one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.core.regions import ArenaRegion, CacheRegion, first_blocks
from baton.engine.core.tiers import Tier

from ..settings import TierSettings
from .disk_files import TierRefused
from .tier_index import Move, group_of


class GroupTiers(NamedTuple):
    """The tiers of one cache group on one rank."""

    arena: ArenaRegion
    name: str  # of its folder below `disk_path`; empty: the only group, whose files are in `disk_path` itself
    fingerprint: str  # of the group's blocks
    num_host_slots: int
    num_disk_slots: int


class TierDivision:
    """The tiers of all cache groups of one rank, in the sizes that its settings ask for."""

    def __init__(self, region: CacheRegion, settings: TierSettings) -> None:
        block_bytes = [arena.block_bytes for arena in region.arenas]
        arena_bytes = [arena.num_bytes for arena in region.arenas]
        host_slots = divide_bytes(settings.host_bytes, arena_bytes, block_bytes)
        disk_slots = divide_bytes(settings.disk_bytes, arena_bytes, block_bytes)
        names, fingerprints = [""], [region.fingerprint]
        if len(region.arenas) > 1:
            fingerprints = [group.fingerprint for group in region.caches.groups]
            names = [
                f"{group.kind}-{fingerprint[:12]}"
                for group, fingerprint in zip(region.caches.groups, fingerprints, strict=True)
            ]
        self.groups = [
            GroupTiers(*each) for each in zip(region.arenas, names, fingerprints, host_slots, disk_slots, strict=True)
        ]
        self.block_sizes = [size / block_bytes[0] for size in block_bytes]  # relative to a block of the first group
        self._firsts = {
            Tier.POOL: first_blocks([arena.num_blocks for arena in region.arenas]),
            Tier.HOST: first_blocks(host_slots),
            Tier.DISK: first_blocks(disk_slots),
        }

    def firsts(self, tier: Tier) -> Sequence[int]:
        """Return the number of each group's first slot, or first block in the pool."""
        return self._firsts[tier]

    def group_of(self, move: Move) -> int:
        return group_of(move.source_slot, self._firsts[move.source])

    def joins_groups(self, move: Move) -> bool:
        """Return whether a move goes from one group to another, which is never valid."""
        return self.group_of(move) != group_of(move.target_slot, self._firsts[move.target])

    def in_group(self, move: Move, group: int) -> Move:
        """Return the move with slot and block numbers that count within the group."""
        source, target = self._firsts[move.source][group], self._firsts[move.target][group]
        return move._replace(source_slot=move.source_slot - source, target_slot=move.target_slot - target)


def divide_bytes(num_bytes: int, arena_bytes: Sequence[int], block_bytes: Sequence[int]) -> list[int]:
    """Return how many slots each group gets if `num_bytes` are divided in proportion to the arenas."""
    total = sum(arena_bytes)
    return [num_bytes * arena // total // block for arena, block in zip(arena_bytes, block_bytes, strict=True)]


def fewest_bytes(arena_bytes: Sequence[int], block_bytes: Sequence[int]) -> int:
    """Return the fewest bytes of which every group gets a slot."""
    total = sum(arena_bytes)
    return max(-(-block * total // arena) for arena, block in zip(arena_bytes, block_bytes, strict=True))


def check_sizes(region: CacheRegion, settings: TierSettings) -> None:
    """Raise `TierRefused` if a tier is too small for a block of each group."""
    fewest = fewest_bytes([arena.num_bytes for arena in region.arenas], [arena.block_bytes for arena in region.arenas])
    for name in ("host_bytes", "disk_bytes"):
        given = getattr(settings, name)
        if not 0 < given < fewest:
            continue
        if len(region.arenas) == 1:
            raise TierRefused(
                f"kv_tiers.{name} is {given}, and a block of this engine has {region.block_bytes} bytes:"
                " give a multiple of that"
            )
        kinds = ", ".join(group.kind for group in region.caches.groups)
        raise TierRefused(
            f"kv_tiers.{name} is {given}, which has no block for some of this model's cache groups ({kinds}):"
            f" give at least {fewest}"
        )

"""The memory of an engine's KV cache on one rank, for transfers and tiers.

    CacheRegion   [ arena of group 0 | arena of group 1 | ... ]        one range, registered as a whole
                    └── ArenaRegion: blocks of one group

Blocks are numbered across all arenas, from 0 on, as in `kv/block_numbers.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from .layout import BLOCK_SIZE, CacheKind, CacheLayout, GroupLayout, KVLayout, SeveralGroups, StateLayout


class ArenaRegion(msgspec.Struct, frozen=True):
    """The memory that holds one rank's part of one group's blocks.

    This rank's part of block b is the `block_bytes` bytes at `address + b * block_bytes`.
    """

    address: int
    num_blocks: int
    device: str  # "cpu" or "cuda:N"
    layout: KVLayout | StateLayout  # of the whole model
    first_head: int  # the first of the layout's heads that this rank keeps
    num_heads: int

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def block_bytes(self) -> int:
        return self.layout.bytes_of(self.heads)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class CacheRegion(msgspec.Struct, frozen=True):
    """The memory of all arenas of one rank: one range, with the arenas in the order of their groups."""

    caches: CacheLayout  # of the whole model
    arenas: tuple[ArenaRegion, ...]  # one for each group

    @classmethod
    def of(cls, arena: ArenaRegion) -> CacheRegion:
        """Return the region of a model with a single cache group, which has this arena."""
        group = GroupLayout(
            kind=CacheKind.FULL, window=None, layers=tuple(range(arena.layout.num_layers)), blocks=arena.layout
        )
        return cls(CacheLayout((group,)), (arena,))

    @property
    def only(self) -> ArenaRegion:
        """The only arena, of a model all of whose layers keep the same. Raises `SeveralGroups`."""
        if len(self.arenas) != 1:
            raise SeveralGroups(f"the layers of this model keep {len(self.arenas)} different kinds of caches")
        return self.arenas[0]

    @property
    def address(self) -> int:
        return self.arenas[0].address

    @property
    def device(self) -> str:
        return self.arenas[0].device

    @property
    def num_bytes(self) -> int:
        last = self.arenas[-1]
        return last.address + last.num_bytes - self.address

    @property
    def num_blocks(self) -> int:
        return sum(arena.num_blocks for arena in self.arenas)

    @property
    def offsets(self) -> Sequence[int]:
        """The offset of each arena in the region, in bytes."""
        return [arena.address - self.address for arena in self.arenas]

    @property
    def first_blocks(self) -> Sequence[int]:
        """The number of the first block of each arena."""
        return first_blocks([arena.num_blocks for arena in self.arenas])

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the first group on this rank."""
        return self.arenas[0].block_bytes

    @property
    def constant_bytes(self) -> int:
        """Bytes of a hand-off that do not grow with the prompt: its states and windows."""
        later = zip(self.caches.groups[1:], self.arenas[1:], strict=True)
        return sum(
            arena.block_bytes * (1 if group.window is None else -(-group.window // self.block_size))
            for group, arena in later
            if group.window is not None or group.kind is CacheKind.STATE
        )

    @property
    def block_size(self) -> int:
        """Tokens in a block of the first group."""
        layout = self.arenas[0].layout
        return layout.block_size if isinstance(layout, KVLayout) else BLOCK_SIZE

    @property
    def fingerprint(self) -> str:
        return self.caches.fingerprint


def first_blocks(sizes: Sequence[int]) -> Sequence[int]:
    """Return the number of the first block of each arena, given the arenas' `sizes` in blocks."""
    return list(itertools.accumulate(sizes[:-1], initial=0))

"""Staging slots: host memory in place of blocks that a transport cannot register.

blocks   [ arena of group 0      | arena of group 1 ]       numbered through all arenas
slots    [ slots | slots ]                                  of the same size as the group's blocks, numbered likewise
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from baton.engine.core.connector import TransferId
from baton.engine.core.kv.blocks import BlockPool
from baton.engine.core.regions import CacheRegion

from ..block_copies import BlockCopier, SlotPair, open_block_copier
from ..descriptors import arenas_of
from ..errors import TransportError
from ..host_memory import HostMemory, HostSlots


class StagingSlots(NamedTuple):
    """The slots of one rank."""

    of_groups: Sequence[HostSlots]
    region: CacheRegion  # the slots as blocks of the same layout, for peers


def take_staging_slots(region: CacheRegion, buffer_bytes: int) -> StagingSlots:
    """Allocate slots for one rank's blocks. Cache groups share the memory in proportion to their arenas.

    Raises `TransportError` if a group would have no slot, or if the memory cannot be pinned.
    """
    counts = [buffer_bytes * arena.num_bytes // region.num_bytes // arena.block_bytes for arena in region.arenas]
    if min(counts) < 1:
        largest = max(arena.block_bytes for arena in region.arenas)
        raise TransportError(
            f"transfer.buffer_bytes is {buffer_bytes} and a block has {largest} bytes:"
            " it should hold the blocks of several of the longest prompts"
        )
    sizes = [count * arena.block_bytes for count, arena in zip(counts, region.arenas, strict=True)]
    memory = HostMemory(1, sum(sizes), region.device)
    slots, arenas, address = [], [], memory.address
    for count, size, arena in zip(counts, sizes, region.arenas, strict=True):
        slots.append(HostSlots(address, count, arena.block_bytes, memory))
        arenas.append(msgspec.structs.replace(arena, address=address, num_blocks=count, device="cpu"))
        address += size
    return StagingSlots(slots, msgspec.structs.replace(region, arenas=tuple(arenas)))


class SlotPool:
    """The free slots of each cache group."""

    def __init__(self, blocks: CacheRegion, slots: CacheRegion) -> None:
        self._first_blocks, self._first_slots = blocks.first_blocks, slots.first_blocks
        self._pools = [BlockPool(arena.num_blocks) for arena in slots.arenas]

    @property
    def num_slots(self) -> int:
        return sum(pool.num_blocks for pool in self._pools)

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self._pools)

    def fit(self, blocks: Sequence[int]) -> bool:
        """Return whether enough slots are free for these blocks."""
        counts = self._counts(blocks)
        return all(count <= pool.num_free for count, pool in zip(counts, self._pools, strict=True))

    def could_fit(self, blocks: Sequence[int]) -> bool:
        """Return whether there would be enough slots for these blocks if all were free."""
        counts = self._counts(blocks)
        return all(count <= pool.num_blocks for count, pool in zip(counts, self._pools, strict=True))

    def allocate(self, blocks: Sequence[int]) -> list[int]:
        """Take a free slot for each block and return the slots."""
        groups = arenas_of(self._first_blocks, blocks)
        slots = np.empty(len(blocks), dtype=np.int64)
        for group, count in enumerate(self._counts(blocks)):
            if count:
                slots[groups == group] = np.add(self._pools[group].allocate(count), self._first_slots[group])
        return [int(slot) for slot in slots]

    def release(self, slots: Sequence[int]) -> None:
        groups = arenas_of(self._first_slots, slots)
        for group, (pool, first) in enumerate(zip(self._pools, self._first_slots, strict=True)):
            pool.release([slot - first for slot, own in zip(slots, groups, strict=True) if own == group])

    def _counts(self, blocks: Sequence[int]) -> list[int]:
        groups = arenas_of(self._first_blocks, blocks)
        return [int(count) for count in np.bincount(groups, minlength=len(self._pools))]


class StagingCopier:
    """A `BlockCopier` between the blocks and slots of all cache groups."""

    def __init__(self, region: CacheRegion, slots: StagingSlots) -> None:
        self._copiers = [
            open_block_copier(arena, of_group) for arena, of_group in zip(region.arenas, slots.of_groups, strict=True)
        ]
        self._first_blocks, self._first_slots = region.first_blocks, slots.region.first_blocks

    def down(self, pairs: Sequence[SlotPair]) -> None:
        for copier, some in self._by_group(pairs):
            copier.down(some)

    def up(self, pairs: Sequence[SlotPair]) -> None:
        for copier, some in self._by_group(pairs):
            copier.up(some)

    def _by_group(self, pairs: Sequence[SlotPair]) -> Iterator[tuple[BlockCopier, Sequence[SlotPair]]]:
        if len(self._copiers) == 1:
            yield self._copiers[0], pairs
            return
        groups = arenas_of(self._first_blocks, [block for block, _ in pairs])
        firsts = zip(self._copiers, self._first_blocks, self._first_slots, strict=True)
        for group, (copier, first_block, first_slot) in enumerate(firsts):
            own = [pair for pair, its in zip(pairs, groups, strict=True) if its == group]
            if own:
                yield copier, [(block - first_block, slot - first_slot) for block, slot in own]


class TransferIds:
    """Pairs of transfer ids: ours, which the engine knows, and that of the inner connector. Ours are never reused."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._inner_of: dict[TransferId, TransferId] = {}
        self._own_of: dict[TransferId, TransferId] = {}

    def new(self) -> TransferId:
        return next(self._ids)

    def pair(self, own: TransferId, inner: TransferId) -> TransferId:
        """Remember a pair until `forget`. Returns `own`."""
        self._inner_of[own], self._own_of[inner] = inner, own
        return own

    def inner_of(self, own: TransferId) -> TransferId | None:
        """Return the inner connector's id. None: the transfer has not begun there, or is over."""
        return self._inner_of.get(own)

    def own_of(self, inner: TransferId) -> TransferId:
        return self._own_of[inner]

    def forget(self, own: TransferId) -> None:
        del self._own_of[self._inner_of.pop(own)]

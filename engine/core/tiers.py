"""The engine's view of the tiers behind its block pool: the host's memory and a disk, which may outlive the process.

`kv_transfer` implements it.

    store(blocks) ......... Stored          the pool's blocks are read in between: nobody may write them
    restore(blocks) ....... Restored        the pool's blocks are written in between: nobody may use them

Exactly one event follows each call. There is no failure event: a block that could not be stored is not found later, and
the engine computes the blocks that could not be restored.

Each cache group has tiers of its own. The pool's blocks are numbered through all arenas (`kv/block_numbers.py`), so a
number tells the group; names of blocks are the same in every group, and are asked for with the number of the group.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from .prefix import BlockHash

CopyId = int


class Tier(enum.StrEnum):
    """A place for a block, the fastest first."""

    POOL = "pool"
    HOST = "host"
    DISK = "disk"


class TierRead(msgspec.Struct, frozen=True):
    """The part of a restore that one tier served."""

    tier: Tier
    num_blocks: float  # of the first group: blocks of others count by their size
    seconds: float  # of the copies alone, without what they waited for


class Stored(msgspec.Struct, frozen=True):
    """The end of a store, whether the blocks were kept or not: the tiers no longer read the pool's blocks."""

    copy_id: CopyId


class Restored(msgspec.Struct, frozen=True):
    """The end of a restore: the tiers no longer write the pool's blocks, and the first `num_blocks` are filled."""

    copy_id: CopyId
    num_blocks: int
    reads: tuple[TierRead, ...] = ()


TierEvent = Stored | Restored


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one engine's tiers. Counters run from the process's start."""

    blocks: dict[str, int] = {}  # kept now, by tier: host, disk
    hits: int = 0  # blocks that were asked for
    misses: int = 0  # full blocks of new prompts that were neither in the pool nor in a tier
    restored_tokens: int = 0
    written_bytes: int = 0  # into all tiers
    evictions: int = 0  # blocks that no tier had room for any longer
    failures: dict[str, int] = {}  # blocks lost, by reason
    min_tokens: int = 0  # a shorter prefix is computed rather than restored
    answers: bool = True  # False: nothing is restored until the tiers do
    restore_s: dict[str, float] = {}  # of one block, by tier, as measured lately; what was not is missing
    compute_s: float = 0.0  # of one block, the same; 0: not known


class TierWatcher(Protocol):
    """Called with the blocks that became restorable and those that no longer are. A block is in one tier at most.

    Blocks are those of the first group, by which prefixes are found.
    """

    def kept(self, block_hash: BlockHash, tier: Tier) -> None: ...
    def lost(self, block_hash: BlockHash, tier: Tier) -> None: ...


class KVTiers(Protocol):
    """The tiers of one engine. One thread calls them. Calls return at once, and none raises for a failing disk.

    A block is known by the hash of its prefix (`prefix.py`), in which the salt is.
    """

    min_tokens: int  # a shorter prefix is computed rather than restored
    block_sizes: Sequence[float]  # of each group, in blocks of the first

    def find(self, hashes: Sequence[BlockHash], group: int = 0) -> int:
        """Return how many leading blocks of a chain could be restored now."""
        ...

    def tier_of(self, block_hash: BlockHash, group: int = 0) -> Tier | None:
        """Return the tier from which a block could be restored now; None if there is none."""
        ...

    def kept_in(self, tier: Tier) -> Iterable[BlockHash]:
        """Return the blocks of the first group that could be restored from a tier now."""
        ...

    def watch(self, watcher: TierWatcher) -> None:
        """Call `watcher` with every change from now on, in the thread that calls the tiers."""
        ...

    def knows(self, block_hash: BlockHash, group: int = 0) -> bool:
        """Return whether the block is kept, or is being stored."""
        ...

    def touch(self, hashes: Sequence[BlockHash], group: int = 0) -> None:
        """Note the use of a prefix: its blocks are evicted later, the first one last. Unknown ones are ignored."""
        ...

    def store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        """Keep blocks of one group."""
        ...

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        """Fill the pool's blocks, of any groups, with those that `find` or `tier_of` has just found."""
        ...

    def poll(self) -> list[TierEvent]:
        """Return the events since the last call, in order."""
        ...

    def stats(self) -> TierStats: ...

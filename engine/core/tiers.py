"""The engine's view of the tiers behind its block pool: the host's memory, and a disk, which may outlive the process.

`kv_transfer` implements it.

    store(blocks) ......... Stored          the pool's blocks are read in between: nothing may write them
    restore(blocks) ....... Restored        the pool's blocks are written in between: nothing may use them

Exactly one event follows each call. There is no failure event: a block that could not be stored is not found later, and
the engine computes blocks that could not be restored.

Each cache group has its own tiers. The pool's blocks are numbered across all arenas (`kv/block_numbers.py`), so a block
number implies its group. A hash can name a block in every group, so calls that take hashes also take a group.
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
    num_blocks: float  # in blocks of the first group: those of others count in proportion to their size
    seconds: float  # of the copies alone, without waiting


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
    """Statistics of one engine's tiers. Counters start with the process."""

    blocks: dict[str, int] = {}  # kept now, by tier: host, disk
    hits: int = 0  # blocks whose restore was started
    misses: int = 0  # full blocks of new prompts that were neither in the pool nor in a tier
    restored_tokens: int = 0
    written_bytes: int = 0  # to all tiers together
    evictions: int = 0  # blocks dropped from the last tier for lack of room
    failures: dict[str, int] = {}  # blocks lost, by reason
    min_tokens: int = 0  # a shorter prefix is computed rather than restored
    answers: bool = True  # False: the tiers do not answer, and nothing is restored until they do
    restore_s: dict[str, float] = {}  # to restore one block, by tier; only tiers that were measured lately
    compute_s: float = 0.0  # to compute one block, as measured lately; 0: not known


class TierWatcher(Protocol):
    """Called for blocks of one group that become restorable, and for those that no longer are.

    A block is in at most one tier.
    """

    def kept(self, block_hash: BlockHash, tier: Tier) -> None: ...
    def lost(self, block_hash: BlockHash, tier: Tier) -> None: ...


class KVTiers(Protocol):
    """The tiers of one engine. One thread makes all calls. They return at once, and never raise because a disk fails.

    A block is identified by the hash of its prefix (`prefix.py`), which includes the salt.
    """

    min_tokens: int  # a shorter prefix is computed rather than restored
    block_sizes: Sequence[float]  # size of each group's blocks, relative to the first group's

    def find(self, hashes: Sequence[BlockHash], group: int = 0) -> int:
        """Return how many leading blocks of a chain of hashes could be restored now."""
        ...

    def tier_of(self, block_hash: BlockHash, group: int = 0) -> Tier | None:
        """Return the tier from which a block could be restored now; None if there is none."""
        ...

    def kept_in(self, tier: Tier, group: int = 0) -> Iterable[BlockHash]:
        """Return the blocks of a group that could be restored from a tier now."""
        ...

    def watch(self, watcher: TierWatcher, group: int = 0) -> None:
        """Call `watcher` for every change of a group from now on, on the thread that calls the tiers."""
        ...

    def knows(self, block_hash: BlockHash, group: int = 0) -> bool:
        """Return whether the block is kept, or is being stored."""
        ...

    def touch(self, hashes: Sequence[BlockHash], group: int = 0) -> None:
        """Note the use of a prefix: its blocks are evicted later, the first one last. Unknown blocks are ignored."""
        ...

    def store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        """Start to store blocks of one group."""
        ...

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        """Start to fill these blocks of the pool, of any groups. `find` or `tier_of` has just found the hashes."""
        ...

    def poll(self) -> list[TierEvent]:
        """Return the events since the last call, in order."""
        ...

    def stats(self) -> TierStats: ...

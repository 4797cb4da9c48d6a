"""The engine's view of memory behind its pool: slower, larger, maybe older than the process.

`kv_transfer` implements it.

    store(blocks) ......... Stored          the pool's blocks are read in between: nobody may write them
    restore(blocks) ....... Restored        the pool's blocks are written in between: nobody may use them

Exactly one event follows each call. None says "failed": what could not be stored is not found later, and of what could
not be restored the engine computes the rest itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from .prefix import BlockHash

CopyId = int


class Stored(msgspec.Struct, frozen=True):
    """Nobody reads the blocks any more, whether they were kept or not."""

    copy_id: CopyId


class Restored(msgspec.Struct, frozen=True):
    """Nobody writes the blocks any more; the first `num_blocks` of them hold what was asked for."""

    copy_id: CopyId
    num_blocks: int


TierEvent = Stored | Restored


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine's tiers. Counters run from the process's start."""

    blocks: dict[str, int] = {}  # kept now, by tier: host, disk
    hits: int = 0  # blocks that were asked for
    misses: int = 0  # full blocks of new prompts that were neither in the pool nor in a tier
    restored_tokens: int = 0
    written_bytes: int = 0  # into all tiers
    evictions: int = 0  # blocks that no tier had room for any longer
    failures: dict[str, int] = {}  # blocks lost, by reason


class KVTiers(Protocol):
    """All calls return at once, and none raises for what memory or disks do. One thread calls them.

    A block is known by the hash of its prefix (`prefix.py`), in which salt and adapter are.
    """

    min_tokens: int  # a shorter prefix is computed rather than restored

    def find(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of a chain could be restored now."""
        ...

    def knows(self, block_hash: BlockHash) -> bool:
        """It is kept, or on its way."""
        ...

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """A prefix was used: its blocks are to stay, the first the longest. Unknown ones are ignored."""
        ...

    def store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId: ...

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        """Fills the blocks with what `find` has found just now."""
        ...

    def poll(self) -> list[TierEvent]:
        """What happened since the last call, in order."""
        ...

    def stats(self) -> TierStats: ...

"""KV tiers without memory or files: the real index, with copies that take the time that a formula gives."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import CopyId, Restored, Stored, Tier, TierEvent, TierRead, TierStats
from baton.kv_transfer.settings import TierSettings
from baton.kv_transfer.tiers.tier_index import IndexedTiers, Move, TierIndex

from .virtual_engine import Speed, VirtualTime


@dataclass(frozen=True)
class _Job:
    copy_id: CopyId
    moves: list[Move]
    is_restore: bool


class VirtualTiers(IndexedTiers):
    """`KVTiers` that lose nothing. They make one copy at a time, restores before stores."""

    def __init__(self, time: VirtualTime, speed: Speed, num_host_blocks: int, num_disk_blocks: int) -> None:
        self.min_tokens = TierSettings(host_bytes=1).min_tokens
        self.on_event: Callable[[], None] = lambda: None
        self._time = time
        self._block_s = {
            Tier.HOST: BLOCK_SIZE / speed.host_tokens_per_s,
            Tier.DISK: BLOCK_SIZE / speed.disk_tokens_per_s,
        }
        self._index = TierIndex(num_host_blocks, num_disk_blocks)
        self._indexes, self._first_blocks, self.block_sizes = [self._index], [0], [1.0]
        self._ids = itertools.count()
        self._restores: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._is_copying = False
        self._events: list[TierEvent] = []

    def store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        return self._begin(self._stores, self._begin_store(hashes, block_ids), is_restore=False)

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        return self._begin(self._restores, self._begin_restore(hashes, block_ids), is_restore=True)

    def poll(self) -> list[TierEvent]:
        events, self._events = self._events, []
        return events

    def stats(self) -> TierStats:
        return TierStats(blocks=self._index.num_kept(), evictions=self._index.evictions)

    def _begin(self, queue: deque[_Job], moves: list[Move], *, is_restore: bool) -> CopyId:
        job = _Job(next(self._ids), moves, is_restore)
        queue.append(job)
        if not self._is_copying:
            self._is_copying = True
            self._time.after(0.0, self._copy)
        return job.copy_id

    def _copy(self) -> None:
        if not self._restores and not self._stores:
            self._is_copying = False
            return
        job = (self._restores or self._stores).popleft()
        self._time.after(sum(map(self._seconds, job.moves)), lambda: self._end(job))

    def _end(self, job: _Job) -> None:
        for move in job.moves:
            if job.is_restore:
                self._index.restored(move, None)
            else:
                self._index.stored(move, None)
        self._events.append(self._restored(job) if job.is_restore else Stored(job.copy_id))
        self.on_event()
        self._copy()

    def _restored(self, job: _Job) -> Restored:
        blocks = Counter(move.source for move in job.moves)
        reads = tuple(TierRead(tier, count, count * self._block_s[tier]) for tier, count in blocks.items())
        return Restored(job.copy_id, len(job.moves), reads)

    def _seconds(self, move: Move) -> float:
        """Return the seconds of a move, which depend on the slower of its two places."""
        return self._block_s[Tier.DISK if Tier.DISK in (move.source, move.target) else Tier.HOST]

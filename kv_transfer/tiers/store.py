"""An engine's `KVTiers`: blocks in host memory and on a disk.

step loop ──store, restore──> TierIndex ──moves──> queues ──> tier thread: TierMover  ──losses──> poll()
                              of each group                                           └──> wake()

Restores overtake stores, because requests wait for them. The mover moves blocks on one rank (`worker.py`) or on all
ranks of a group (`group.py`); the index is the same.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from baton.engine.core.prefix import BlockHash
from baton.engine.core.regions import CacheRegion
from baton.engine.core.tiers import CopyId, Restored, Stored, Tier, TierEvent, TierRead, TierStats

from ..affinity import pin_thread
from ..errors import RankLost, TransferError
from ..group.rpc import GroupSocket
from ..settings import SAVE_S, TierSettings
from ..threads import OwnerThread
from .division import TierDivision, check_sizes
from .group import TierGroup
from .tier_index import IndexedTiers, Loss, Move, TierIndex
from .worker import Losses, TierMover, TierWorker, take_disk_space

logger = logging.getLogger(__name__)

SAVE_BLOCKS = 32  # moved at a time
CLOSE_TIMEOUT_S = 10.0  # for the running copy and for saving
RECORD_USES_EVERY_S = 10.0


class TierThreadDied(TransferError):
    """The tier thread died of a bug in Baton (its cause is chained): replace the process."""


class _Job(NamedTuple):
    copy_id: CopyId
    moves: list[Move]
    is_restore: bool


class _Done(NamedTuple):
    losses: Losses
    reads: tuple[TierRead, ...] = ()


class _Uses(NamedTuple):
    """Uses of blocks on the disk, to be recorded there."""

    used: list[tuple[int, BlockHash]]


class TierStore(IndexedTiers):
    """Implements `engine.core.tiers.KVTiers`. The step loop calls it; the tier thread calls `wake`.

    `name` must be unique in this process. The other ranks of a group join rank 0, which this is, at `group_socket`.
    `close` closes the socket too; if the constructor raises, it stays open. Raises `TierRefused` for a folder that
    cannot be used, and for sizes of which some cache group gets no slot; `TransportError` if NIXL cannot read and write
    files, or another rank does not join or cannot keep its share.
    """

    def __init__(
        self,
        region: CacheRegion,
        settings: TierSettings,
        *,
        name: str,
        cpu_affinity: str,
        wake: Callable[[], None] = lambda: None,
        group_socket: GroupSocket | None = None,
    ) -> None:
        check_sizes(region, settings)
        self._region, self._settings, self._name = region, settings, name
        self._division = TierDivision(region, settings)
        self.block_sizes = self._division.block_sizes
        self._first_blocks = region.first_blocks
        self._cpu_affinity, self._group_socket = cpu_affinity, group_socket
        self.min_tokens = settings.min_tokens
        self._wake = wake
        self._ids = itertools.count(1)
        self._work = threading.Condition()
        self._restores: collections.deque[_Job | _Uses] = collections.deque()
        self._stores: collections.deque[_Job | _Uses] = collections.deque()
        self._closing = False
        self._finished: collections.deque[tuple[_Job, _Done]] = collections.deque()
        self._failure: Exception | None = None
        self._disk_failed = False
        self._written_bytes = 0
        self._record_uses_at = time.monotonic() + RECORD_USES_EVERY_S
        self._thread = OwnerThread("baton-tiers", self._run)
        self._thread.open()

    def store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        return self._enqueue(self._stores, self._begin_store(hashes, block_ids), is_restore=False)

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        return self._enqueue(self._restores, self._begin_restore(hashes, block_ids), is_restore=True)

    def poll(self) -> list[TierEvent]:
        """Return the copies that have ended. Raises `TierThreadDied` once there can be no more."""
        failure = self._failure  # read before the copies, so that all copies of a thread that died are returned first
        events: list[TierEvent] = []
        while self._finished:
            events.append(self._settle(*self._finished.popleft()))
        if self._disk_failed:
            for index in self._indexes:
                index.close_disk()
        if not events and failure is not None:
            raise TierThreadDied(f"the KV tiers stopped: {failure}") from failure
        if any(index.any_used for index in self._indexes) and time.monotonic() >= self._record_uses_at:
            self._record_uses_at = time.monotonic() + RECORD_USES_EVERY_S
            self._put(self._stores, _Uses(self._take_used()))
        return events

    def stats(self) -> TierStats:
        blocks, losses = collections.Counter[str](), collections.Counter[Loss]()
        for index in self._indexes:
            blocks.update(index.num_kept())
            losses.update(index.losses)
        return TierStats(
            blocks=dict(blocks),
            written_bytes=self._written_bytes,
            evictions=sum(index.evictions for index in self._indexes),
            failures={loss.value: count for loss, count in losses.items() if count},
        )

    def close(self) -> bool:
        """Finish stores, then save the host tier to the disk, for at most `SAVE_S`. No other call may follow.

        Returns False if the tier thread has not ended within `CLOSE_TIMEOUT_S`. It is left running then.
        """
        with self._work:
            self._closing = True
            self._work.notify()
        return self._thread.ends_within(CLOSE_TIMEOUT_S)

    def _enqueue(self, queue: collections.deque[_Job | _Uses], moves: list[Move], *, is_restore: bool) -> CopyId:
        job = _Job(next(self._ids), moves, is_restore)
        self._put(queue, job)
        return job.copy_id

    def _put(self, queue: collections.deque[_Job | _Uses], job: _Job | _Uses) -> None:
        with self._work:
            queue.append(job)
            self._work.notify()

    def _settle(self, job: _Job, done: _Done) -> TierEvent:
        losses = done.losses
        if not job.is_restore:
            for move, loss in zip(job.moves, losses, strict=True):
                group = self._division.group_of(move)
                self._indexes[group].stored(move, loss)
                self._written_bytes += self._region.arenas[group].block_bytes if loss is None else 0
            return Stored(job.copy_id)
        for move, loss in zip(job.moves, losses, strict=True):
            self._indexes[self._division.group_of(move)].restored(move, loss)
        lost = (number for number, loss in enumerate(losses) if loss is not None)
        return Restored(job.copy_id, next(lost, len(losses)), done.reads)

    def _take_used(self) -> list[tuple[int, BlockHash]]:
        return [use for index in self._indexes for use in index.take_used()]

    # ------------------------------------------------------------------ in the tier thread

    def _run(self, ready: Callable[[], None]) -> None:
        mover = self._open_mover()
        self._indexes = _open_indexes(mover, self._division)  # used by the step loop from now until `close`
        ready()
        try:
            while (job := self._next_job()) is not None:
                self._do(mover, job)
            self._save_blocks(mover)
        except RankLost as error:
            logger.error("the KV tiers stopped: %s", error)
            self._fail(error)
        except Exception as error:
            logger.exception("the tier thread died")
            self._fail(error)
        mover.close()

    def _open_mover(self) -> TierMover:
        pin_thread(self._cpu_affinity, self._region.device)
        if self._group_socket is not None:
            fingerprint = self._region.fingerprint
            return TierGroup(fingerprint, self._division, self._settings, self._name, self._group_socket)
        return TierWorker(self._division, self._name, take_disk_space(self._division, self._settings))

    def _do(self, mover: TierMover, job: _Job | _Uses) -> None:
        if isinstance(job, _Uses):
            mover.note_use(job.used)
            return
        done = self._read(mover, job.moves) if job.is_restore else _Done(mover.move(job.moves))
        self._disk_failed = mover.disk_failed
        self._finished.append((job, done))
        self._wake()

    def _read(self, mover: TierMover, moves: Sequence[Move]) -> _Done:
        """Carry out restores, and measure the time for each tier."""
        losses: Losses = []
        reads = []
        for tier, group in itertools.groupby(moves, key=attrgetter("source")):
            alike, began_s = list(group), time.perf_counter()
            losses += mover.move(alike)
            seconds = time.perf_counter() - began_s
            num_blocks = sum(self.block_sizes[self._division.group_of(move)] for move in alike)
            reads.append(TierRead(tier, num_blocks, seconds))
        return _Done(losses, tuple(reads))

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._wake()

    def _next_job(self) -> _Job | _Uses | None:
        with self._work:
            while not self._closing:
                for queue in (self._restores, self._stores):
                    if queue:
                        return queue.popleft()
                self._work.wait()
        return None

    def _save_blocks(self, mover: TierMover) -> None:
        """Save blocks of all groups in turn for the next process. Only this thread uses the indexes now."""
        deadline = time.monotonic() + SAVE_S
        while self._stores and time.monotonic() < deadline:
            self._do(mover, self._stores.popleft())
        while self._finished:
            self._settle(*self._finished.popleft())
        if mover.disk_failed:
            return
        unsaved = list(self._indexes)
        while unsaved and time.monotonic() < deadline:
            index = unsaved.pop(0)
            if moves := index.save(SAVE_BLOCKS):
                self._settle(_Job(next(self._ids), moves, is_restore=False), _Done(mover.move(moves)))
                unsaved.append(index)
        for index in self._indexes:
            index.saved()
        mover.note_use(self._take_used())


def _open_indexes(mover: TierMover, division: TierDivision) -> list[TierIndex]:
    """Return the index of each cache group."""
    first_host, first_disk = division.firsts(Tier.HOST), division.firsts(Tier.DISK)
    indexes = []
    for number, group in enumerate(division.groups):
        num_host, num_disk, kept = mover.num_host_slots[number], mover.num_disk_slots[number], mover.kept[number]
        indexes.append(
            TierIndex(num_host, num_disk, kept, first_host_slot=first_host[number], first_disk_slot=first_disk[number])
        )
        logger.info(
            "KV tiers%s: %d blocks in memory, %d on disk, of which %d are kept from an earlier run",
            f" of {group.name}" if group.name else "",
            num_host,
            num_disk,
            len(kept),
        )
    if mover.disk_full:
        indexes[0].losses[Loss.DISK_FULL] += 1
        logger.warning("there is no disk tier until the next start: %s", mover.disk_full)
    return indexes

"""An engine's `KVTiers`: blocks in the host's memory and on a disk.

step loop ──store, restore──> TierIndex ──moves──> queues ──> tier thread: TierMover  ──losses──> poll()
                                                                                      └──> wake()

Restores overtake stores: a request waits for them. The mover is that of one rank (`worker.py`) or of all ranks of a
group (`group.py`); the index is the same.
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
from baton.engine.core.regions import ArenaRegion
from baton.engine.core.tiers import CopyId, Restored, Stored, TierEvent, TierRead, TierStats

from ..affinity import pin_thread
from ..errors import RankLost, TransferError
from ..group.rpc import GroupSocket
from ..settings import SAVE_S, TierSettings
from ..threads import OwnerThread
from .disk_files import TierRefused
from .group import TierGroup
from .tier_index import IndexedTiers, Loss, Move, TierIndex
from .worker import Losses, TierMover, TierWorker, take_disk_space

logger = logging.getLogger(__name__)

SAVE_BLOCKS = 32  # moved at a time
CLOSE_TIMEOUT_S = 10.0  # for the copy that is under way, and for saving
RECORD_USES_EVERY_S = 10.0


class TierThreadDied(TransferError):
    """The tier thread met an error of our own making (its cause is chained): the process should be replaced."""


class _Job(NamedTuple):
    copy_id: CopyId
    moves: list[Move]
    is_restore: bool


class _Done(NamedTuple):
    losses: Losses
    reads: tuple[TierRead, ...] = ()


class _Uses(NamedTuple):
    """Blocks on the disk that were used, to be recorded there."""

    used: list[tuple[int, BlockHash]]


class TierStore(IndexedTiers):
    """Implements `engine.core.tiers.KVTiers`. The step loop calls it; `wake` is called from the tier thread.

    `name` must be unique in this process. The other ranks of a group, of which this is rank 0, join at `group_socket`;
    it is closed with the store, and stays open where this raises. Raises `TierRefused` for a folder that cannot be used
    and for sizes that hold no block, `TransportError` where NIXL cannot read and write files, or another rank does not
    come or cannot keep its share.
    """

    def __init__(
        self,
        region: ArenaRegion,
        settings: TierSettings,
        *,
        name: str,
        cpu_affinity: str,
        wake: Callable[[], None] = lambda: None,
        group_socket: GroupSocket | None = None,
    ) -> None:
        _check_sizes(region, settings)
        self._region, self._settings, self._name = region, settings, name
        self._cpu_affinity, self._group_socket = cpu_affinity, group_socket
        self.min_tokens = settings.min_tokens
        self._block_bytes = region.block_bytes
        self._wake = wake
        self._ids = itertools.count(1)
        self._work = threading.Condition()
        self._restores: collections.deque[_Job | _Uses] = collections.deque()
        self._stores: collections.deque[_Job | _Uses] = collections.deque()
        self._closing = False
        self._finished: collections.deque[tuple[_Job, _Done]] = collections.deque()
        self._failure: Exception | None = None
        self._disk_failed = False
        self._num_written = 0
        self._record_uses_at = time.monotonic() + RECORD_USES_EVERY_S
        self._thread = OwnerThread("baton-tiers", self._run)
        self._thread.open()

    def store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        return self._enqueue(self._stores, self._index.store(hashes, block_ids), is_restore=False)

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        return self._enqueue(self._restores, self._index.restore(hashes, block_ids), is_restore=True)

    def poll(self) -> list[TierEvent]:
        """Return the copies that have ended. Raises `TierThreadDied` once nothing more can happen."""
        failure = self._failure  # read first: copies that ended before the thread died are returned before this raises
        events: list[TierEvent] = []
        while self._finished:
            events.append(self._settle(*self._finished.popleft()))
        if self._disk_failed:
            self._index.close_disk()
        if not events and failure is not None:
            raise TierThreadDied(f"the KV tiers stopped: {failure}") from failure
        if self._index.any_used and time.monotonic() >= self._record_uses_at:
            self._record_uses_at = time.monotonic() + RECORD_USES_EVERY_S
            self._put(self._stores, _Uses(self._index.take_used()))
        return events

    def stats(self) -> TierStats:
        return TierStats(
            blocks=self._index.num_kept(),
            written_bytes=self._num_written * self._block_bytes,
            evictions=self._index.evictions,
            failures={loss.value: count for loss, count in self._index.losses.items() if count},
        )

    def close(self) -> None:
        """Finish stores, then save the host's blocks to the disk, for at most `SAVE_S`. No other call may follow."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the KV tiers are in a copy that does not end: their thread is left alone")

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
                self._index.stored(move, loss)
                self._num_written += loss is None
            return Stored(job.copy_id)
        for move, loss in zip(job.moves, losses, strict=True):
            self._index.restored(move, loss)
        lost = (number for number, loss in enumerate(losses) if loss is not None)
        return Restored(job.copy_id, next(lost, len(losses)), done.reads)

    # ------------------------------------------------------------------ in the tier thread

    def _run(self, ready: Callable[[], None]) -> None:
        mover = self._open_mover()
        self._index = _open_index(mover)  # used by the step loop from here on, until `close`
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
            return TierGroup(self._region, self._settings, self._name, self._group_socket)
        space = take_disk_space(self._region, self._settings)
        return TierWorker(self._region, self._settings, self._name, space)

    def _do(self, mover: TierMover, job: _Job | _Uses) -> None:
        if isinstance(job, _Uses):
            mover.note_use(job.used)
            return
        done = _read(mover, job.moves) if job.is_restore else _Done(mover.move(job.moves))
        self._disk_failed = mover.disk_failed
        self._finished.append((job, done))
        self._wake()

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
        """Save blocks for the next process. Only this thread uses the index now."""
        deadline = time.monotonic() + SAVE_S
        while self._stores and time.monotonic() < deadline:
            self._do(mover, self._stores.popleft())
        while self._finished:
            self._settle(*self._finished.popleft())
        if mover.disk_failed:
            return
        while time.monotonic() < deadline and (moves := self._index.save(SAVE_BLOCKS)):
            self._settle(_Job(next(self._ids), moves, is_restore=False), _Done(mover.move(moves)))
        self._index.saved()
        mover.note_use(self._index.take_used())


def _open_index(mover: TierMover) -> TierIndex:
    index = TierIndex(mover.num_host_slots, mover.num_disk_slots, mover.kept)
    if mover.disk_full:
        index.losses[Loss.DISK_FULL] += 1
        logger.warning("there is no disk tier until the next start: %s", mover.disk_full)
    logger.info(
        "KV tiers: %d blocks in memory, %d on disk, of which %d are there from before",
        mover.num_host_slots,
        mover.num_disk_slots,
        len(mover.kept),
    )
    return index


def _read(mover: TierMover, moves: Sequence[Move]) -> _Done:
    """Carry out restores, and measure how long each tier took."""
    losses: Losses = []
    reads = []
    for tier, group in itertools.groupby(moves, key=attrgetter("source")):
        alike, began_s = list(group), time.perf_counter()
        losses += mover.move(alike)
        reads.append(TierRead(tier, len(alike), time.perf_counter() - began_s))
    return _Done(losses, tuple(reads))


def _check_sizes(region: ArenaRegion, settings: TierSettings) -> None:
    for name in ("host_bytes", "disk_bytes"):
        given = getattr(settings, name)
        if 0 < given < region.block_bytes:
            raise TierRefused(
                f"kv_tiers.{name} is {given}, and a block of this engine has {region.block_bytes} bytes:"
                " give a multiple of that"
            )

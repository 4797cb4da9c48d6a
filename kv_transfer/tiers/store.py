"""An engine's `KVTiers`: what it keeps in the host's memory and on a disk.

step loop ──store, restore──> TierBooks ──moves──> queues ──> tier thread: TierHands  ──losses──> poll()
                                                                                      └──> wake()

Restores overtake stores: a request waits for them. The hands are those of one rank (`worker.py`) or of all ranks of a
group (`ranks.py`); the books are the same.
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

from baton.engine.core.layout import KVRegion
from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import CopyId, Restored, Stored, TierEvent, TierRead, TierStats

from ..affinity import pin_thread
from ..errors import RankLost, TransferError
from ..net.channel import RankSocket
from ..threads import OwnerThread
from .booked import BookedTiers
from .books import Loss, Move, TierBooks
from .disk_files import TierRefused
from .ranks import TierGroup
from .settings import SAVE_S, TierSettings
from .worker import Losses, TierHands, TierWorker, take_room

logger = logging.getLogger(__name__)

SAVE_BLOCKS = 32  # at a time
CLOSE_TIMEOUT_S = 10.0  # for the copy that is under way, and what may be saved then
NOTE_USE_EVERY_S = 10.0


class TierThreadDied(TransferError):
    """The tier thread met an error of our own making (its cause is chained): the process should be replaced."""


class _Job(NamedTuple):
    copy_id: CopyId
    moves: list[Move]
    is_restore: bool


class _Done(NamedTuple):
    losses: Losses
    reads: tuple[TierRead, ...] = ()


class _Use(NamedTuple):
    """Which blocks on the disk were used, to be written down."""

    used: list[tuple[int, BlockHash]]


class TierStore(BookedTiers):
    """Implements `engine.core.tiers.KVTiers`. The step loop calls it; `wake` is called from the tier thread.

    `name` is that of no other in this process. `ranks`: where the other ranks of a group join, of which this is rank 0;
    it is closed with the store, and stays open where this raises. Raises `TierRefused` for a folder that cannot be used
    and for sizes that hold no block, `TransportError` where NIXL cannot read and write files, or another rank does not
    come or cannot keep its share.
    """

    def __init__(
        self,
        region: KVRegion,
        settings: TierSettings,
        *,
        name: str,
        cpu_affinity: str,
        wake: Callable[[], None] = lambda: None,
        ranks: RankSocket | None = None,
    ) -> None:
        _check_sizes(region, settings)
        self._region, self._settings, self._name = region, settings, name
        self._cpu_affinity, self._ranks = cpu_affinity, ranks
        self.min_tokens = settings.min_tokens
        self._block_bytes = region.block_bytes
        self._wake = wake
        self._ids = itertools.count(1)
        self._work = threading.Condition()
        self._restores: collections.deque[_Job | _Use] = collections.deque()
        self._stores: collections.deque[_Job | _Use] = collections.deque()
        self._closing = False
        self._finished: collections.deque[tuple[_Job, _Done]] = collections.deque()
        self._failure: Exception | None = None
        self._disk_failed = False
        self._num_written = 0
        self._note_use_at = time.monotonic() + NOTE_USE_EVERY_S
        self._thread = OwnerThread("baton-tiers", self._run)
        self._thread.open()

    def store(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        return self._enqueue(self._stores, self._books.store(hashes, block_ids), is_restore=False)

    def restore(self, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> CopyId:
        return self._enqueue(self._restores, self._books.restore(hashes, block_ids), is_restore=True)

    def poll(self) -> list[TierEvent]:
        """Raises `TierThreadDied` once nothing more can happen."""
        failure = self._failure  # looked at first: what was done before the thread died is delivered before it raises
        events: list[TierEvent] = []
        while self._finished:
            events.append(self._settle(*self._finished.popleft()))
        if self._disk_failed:
            self._books.close_disk()
        if not events and failure is not None:
            raise TierThreadDied(f"the KV tiers stopped: {failure}") from failure
        if self._books.any_used and time.monotonic() >= self._note_use_at:
            self._note_use_at = time.monotonic() + NOTE_USE_EVERY_S
            self._put(self._stores, _Use(self._books.take_used()))
        return events

    def stats(self) -> TierStats:
        return TierStats(
            blocks=self._books.num_kept(),
            written_bytes=self._num_written * self._block_bytes,
            evictions=self._books.evictions,
            failures={loss.value: count for loss, count in self._books.losses.items() if count},
        )

    def close(self) -> None:
        """Stores what it was asked for, and saves what the host's memory has on the disk, for as long as `SAVE_S`.

        Nothing else may be called then.
        """
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the KV tiers are in a copy that does not end: their thread is left alone")

    def _enqueue(self, queue: collections.deque[_Job | _Use], moves: list[Move], *, is_restore: bool) -> CopyId:
        job = _Job(next(self._ids), moves, is_restore)
        self._put(queue, job)
        return job.copy_id

    def _put(self, queue: collections.deque[_Job | _Use], job: _Job | _Use) -> None:
        with self._work:
            queue.append(job)
            self._work.notify()

    def _settle(self, job: _Job, done: _Done) -> TierEvent:
        losses = done.losses
        if not job.is_restore:
            for move, loss in zip(job.moves, losses, strict=True):
                self._books.stored(move, loss)
                self._num_written += loss is None
            return Stored(job.copy_id)
        for move, loss in zip(job.moves, losses, strict=True):
            self._books.restored(move, loss)
        lost = (number for number, loss in enumerate(losses) if loss is not None)
        return Restored(job.copy_id, next(lost, len(losses)), done.reads)

    # ------------------------------------------------------------------ in the tier thread

    def _run(self, ready: Callable[[], None]) -> None:
        hands = self._open_hands()
        self._books = _open_books(hands)  # the step loop's from here on, until the end
        ready()
        try:
            while (job := self._next_job()) is not None:
                self._do(hands, job)
            self._wind_up(hands)
        except RankLost as error:
            logger.error("the KV tiers stopped: %s", error)
            self._die(error)
        except Exception as error:
            logger.exception("the tier thread died")
            self._die(error)
        hands.close()

    def _open_hands(self) -> TierHands:
        pin_thread(self._cpu_affinity, self._region.device)
        if self._ranks is not None:
            return TierGroup(self._region, self._settings, self._name, self._ranks)
        room = take_room(self._region, self._settings)
        return TierWorker(self._region, self._settings, self._name, room)

    def _do(self, hands: TierHands, job: _Job | _Use) -> None:
        if isinstance(job, _Use):
            hands.note_use(job.used)
            return
        done = _read(hands, job.moves) if job.is_restore else _Done(hands.carry_out(job.moves))
        self._disk_failed = hands.disk_failed
        self._finished.append((job, done))
        self._wake()

    def _die(self, error: Exception) -> None:
        self._failure = error
        self._wake()

    def _next_job(self) -> _Job | _Use | None:
        with self._work:
            while not self._closing:
                for queue in (self._restores, self._stores):
                    if queue:
                        return queue.popleft()
                self._work.wait()
        return None

    def _wind_up(self, hands: TierHands) -> None:
        """What an orderly end leaves to the next process. The books are this thread's now: nobody else calls."""
        deadline = time.monotonic() + SAVE_S
        while self._stores and time.monotonic() < deadline:
            self._do(hands, self._stores.popleft())
        while self._finished:
            self._settle(*self._finished.popleft())
        if hands.disk_failed:
            return
        while time.monotonic() < deadline and (moves := self._books.save(SAVE_BLOCKS)):
            self._settle(_Job(next(self._ids), moves, is_restore=False), _Done(hands.carry_out(moves)))
        self._books.saved()
        hands.note_use(self._books.take_used())


def _open_books(hands: TierHands) -> TierBooks:
    books = TierBooks(hands.num_host_slots, hands.num_disk_slots, hands.kept)
    if hands.disk_full:
        books.losses[Loss.DISK_FULL] += 1
        logger.warning("there is no disk tier until the next start: %s", hands.disk_full)
    logger.info(
        "KV tiers: %d blocks in memory, %d on disk, of which %d are there from before",
        hands.num_host_slots,
        hands.num_disk_slots,
        len(hands.kept),
    )
    return books


def _read(hands: TierHands, moves: Sequence[Move]) -> _Done:
    """Moves up, with what they took of each tier."""
    losses: Losses = []
    reads = []
    for tier, group in itertools.groupby(moves, key=attrgetter("source")):
        alike, began_s = list(group), time.perf_counter()
        losses += hands.carry_out(alike)
        reads.append(TierRead(tier, len(alike), time.perf_counter() - began_s))
    return _Done(losses, tuple(reads))


def _check_sizes(region: KVRegion, settings: TierSettings) -> None:
    for name in ("host_bytes", "disk_bytes"):
        given = getattr(settings, name)
        if 0 < given < region.block_bytes:
            raise TierRefused(
                f"kv_tiers.{name} is {given}, and a block of this engine has {region.block_bytes} bytes:"
                " give a multiple of that"
            )

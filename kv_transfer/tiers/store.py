"""An engine's `KVTiers`: what it keeps in the host's memory and on a disk.

step loop ──store, restore──> TierBooks ──moves──> queues ──> tier thread: TierWorker  ──losses──> poll()
                                                                                       └──> wake()

Restores overtake stores: a request waits for them.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from baton.engine.core.layout import KVRegion
from baton.engine.core.prefix import BlockHash
from baton.engine.core.tiers import CopyId, Restored, Stored, TierEvent, TierStats

from ..affinity import pin_thread
from ..errors import TransferError
from .books import Loss, Move, TierBooks
from .disk_files import TierRefused
from .settings import TierSettings
from .worker import Losses, TierWorker

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0  # for the copy that is under way


class TierThreadDied(TransferError):
    """The tier thread met an error of our own making (its cause is chained): the process should be replaced."""


class _Job(NamedTuple):
    copy_id: CopyId
    moves: list[Move]
    is_restore: bool


class TierStore:
    """Implements `engine.core.tiers.KVTiers`. The step loop calls it; `wake` is called from the tier thread.

    `name` is that of no other in this process. Raises `TierRefused` for a folder that cannot be used and for sizes that
    hold no block, `TransportError` where NIXL cannot read and write files.
    """

    def __init__(
        self,
        region: KVRegion,
        settings: TierSettings,
        *,
        name: str,
        cpu_affinity: str,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        _check_sizes(region, settings)
        self.min_tokens = settings.min_tokens
        self._block_bytes = region.block_bytes
        self._wake = wake
        self._ids = itertools.count(1)
        self._work = threading.Condition()
        self._restores: collections.deque[_Job] = collections.deque()
        self._stores: collections.deque[_Job] = collections.deque()
        self._closing = False
        self._finished: collections.deque[tuple[_Job, Losses]] = collections.deque()
        self._failure: Exception | None = None
        self._disk_failed = False
        self._num_written = 0
        started: Future[TierWorker] = Future()
        arguments = (region, settings, name, cpu_affinity, started)
        self._thread = threading.Thread(target=self._run, args=arguments, name="baton-tiers", daemon=True)
        self._thread.start()
        worker = started.result()
        self._books = TierBooks(
            worker.num_host_slots,
            worker.num_disk_slots,
            [(record.block_hash, record.slot) for record in worker.records],
        )
        self._books.losses[Loss.DISK_FULL] += worker.disk_is_full
        logger.info(
            "KV tiers: %d blocks in memory, %d on disk, of which %d are there from before",
            worker.num_host_slots,
            worker.num_disk_slots,
            len(worker.records),
        )

    def find(self, hashes: Sequence[BlockHash]) -> int:
        return self._books.find(hashes)

    def knows(self, block_hash: BlockHash) -> bool:
        return self._books.knows(block_hash)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        self._books.touch(hashes)

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
        return events

    def stats(self) -> TierStats:
        return TierStats(
            blocks=self._books.num_kept(),
            written_bytes=self._num_written * self._block_bytes,
            evictions=self._books.evictions,
            failures={loss.value: count for loss, count in self._books.losses.items() if count},
        )

    def close(self) -> None:
        """What is not stored yet is not stored any more."""
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the KV tiers are in a copy that does not end: their thread is left alone")

    def _enqueue(self, queue: collections.deque[_Job], moves: list[Move], *, is_restore: bool) -> CopyId:
        job = _Job(next(self._ids), moves, is_restore)
        with self._work:
            queue.append(job)
            self._work.notify()
        return job.copy_id

    def _settle(self, job: _Job, losses: Losses) -> TierEvent:
        if not job.is_restore:
            for move, loss in zip(job.moves, losses, strict=True):
                self._books.stored(move, loss)
                self._num_written += loss is None
            return Stored(job.copy_id)
        for move, loss in zip(job.moves, losses, strict=True):
            self._books.restored(move, loss)
        lost = (number for number, loss in enumerate(losses) if loss is not None)
        return Restored(job.copy_id, next(lost, len(losses)))

    # ------------------------------------------------------------------ in the tier thread

    def _run(
        self, region: KVRegion, settings: TierSettings, name: str, cpu_affinity: str, started: Future[TierWorker]
    ) -> None:
        try:
            pin_thread(cpu_affinity, region.device)
            worker = TierWorker(region, settings, name)
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(worker)
        try:
            while (job := self._next_job()) is not None:
                losses = worker.carry_out(job.moves)
                self._disk_failed = worker.disk_failed
                self._finished.append((job, losses))
                self._wake()
        except Exception as error:
            logger.exception("the tier thread died")
            self._failure = error
            self._wake()
        worker.close()

    def _next_job(self) -> _Job | None:
        with self._work:
            while not self._closing:
                for queue in (self._restores, self._stores):
                    if queue:
                        return queue.popleft()
                self._work.wait()
        return None


def _check_sizes(region: KVRegion, settings: TierSettings) -> None:
    for name in ("host_bytes", "disk_bytes"):
        given = getattr(settings, name)
        if 0 < given < region.block_bytes:
            raise TierRefused(
                f"kv_tiers.{name} is {given}, and a block of this engine has {region.block_bytes} bytes:"
                " give a multiple of that"
            )

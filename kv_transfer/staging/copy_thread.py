"""A thread that copies between an engine's blocks and staging slots, in order."""

from __future__ import annotations

import collections
import logging
import queue
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..affinity import pin_thread
from ..block_copies import BlockCopier, SlotPair
from ..errors import TransferThreadDied
from ..threads import CLOSE_TIMEOUT_S, OwnerThread

logger = logging.getLogger(__name__)

Call = Callable[[], None]


class _SlotCopy(NamedTuple):
    is_down: bool  # from blocks to slots
    pairs: Sequence[SlotPair]
    after_copy: Call | None  # called in the copying thread
    on_poll: Call  # called in the thread that polls


class CopyThread:
    """A thread that copies between blocks and slots. It calls `wake` when `poll` has something new.

    `begin` makes the copier in that thread. The constructor raises its errors.
    """

    def __init__(self, begin: Callable[[], BlockCopier], wake: Call, device: str, cpu_affinity: str) -> None:
        self._begin, self._device, self._cpu_affinity = begin, device, cpu_affinity
        self._wake = wake
        self._jobs: queue.SimpleQueue[_SlotCopy | None] = queue.SimpleQueue()
        self._done: collections.deque[Call] = collections.deque()
        self._failure: Exception | None = None
        self._thread = OwnerThread("baton-copies", self._run)
        self._thread.open()

    def down(self, pairs: Sequence[SlotPair], after_copy: Call, on_poll: Call) -> None:
        """Copy blocks into slots, then call `after_copy` in the copying thread and have `poll` return `on_poll`."""
        self._jobs.put(_SlotCopy(True, pairs, after_copy, on_poll))

    def up(self, pairs: Sequence[SlotPair], on_poll: Call) -> None:
        """Copy slots into blocks, then have `poll` return `on_poll`."""
        self._jobs.put(_SlotCopy(False, pairs, None, on_poll))

    def poll(self) -> list[Call]:
        """Return `on_poll` of each finished copy, to be called. Raises `TransferThreadDied` once there are no more."""
        failure = self._failure
        done = []
        while self._done:
            done.append(self._done.popleft())
        if not done and failure is not None:
            raise TransferThreadDied(f"copies to and from the host buffer stopped: {failure}") from failure
        return done

    def close(self) -> bool:
        """End the thread after all queued copies. Returns False if it has not ended within `CLOSE_TIMEOUT_S`."""
        self._jobs.put(None)
        return self._thread.ends_within(CLOSE_TIMEOUT_S)

    def _run(self, ready: Callable[[], None]) -> None:
        pin_thread(self._cpu_affinity, self._device)
        copier = self._begin()
        ready()
        try:
            while (job := self._jobs.get()) is not None:
                self._copy(copier, job)
        except Exception as error:
            logger.exception("the thread of copies died")
            self._failure = error
            self._wake()

    def _copy(self, copier: BlockCopier, job: _SlotCopy) -> None:
        if job.is_down:
            copier.down(job.pairs)
        else:
            copier.up(job.pairs)
        if job.after_copy is not None:
            job.after_copy()
        self._done.append(job.on_poll)
        self._wake()

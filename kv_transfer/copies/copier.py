"""Copies between an engine's blocks and the host's memory, in a thread of their own, in order."""

from __future__ import annotations

import collections
import logging
import queue
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..affinity import pin_thread
from ..errors import TransferThreadDied
from ..threads import OwnerThread
from .host_memory import Copies, Pair

logger = logging.getLogger(__name__)

Call = Callable[[], None]


class _Job(NamedTuple):
    downwards: bool
    pairs: Sequence[Pair]
    at_once: Call | None  # by the thread that copied
    done: Call  # by whoever polls


class Copier:
    """`wake` is called from its thread when `poll` has something new.

    `begin` is called in that thread; what it raises, this raises.
    """

    def __init__(self, begin: Callable[[], Copies], wake: Call, device: str, cpu_affinity: str) -> None:
        self._begin, self._device, self._cpu_affinity = begin, device, cpu_affinity
        self._wake = wake
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: collections.deque[Call] = collections.deque()
        self._failure: Exception | None = None
        self._thread = OwnerThread("baton-copies", self._run)
        self._thread.open()

    def down(self, pairs: Sequence[Pair], at_once: Call, done: Call) -> None:
        """Blocks into slots."""
        self._jobs.put(_Job(True, pairs, at_once, done))

    def up(self, pairs: Sequence[Pair], done: Call) -> None:
        """Slots into blocks."""
        self._jobs.put(_Job(False, pairs, None, done))

    def poll(self) -> list[Call]:
        """What follows from the copies that are done. Raises `TransferThreadDied` once nothing more can happen."""
        failure = self._failure
        done = []
        while self._done:
            done.append(self._done.popleft())
        if not done and failure is not None:
            raise TransferThreadDied(f"copies to and from the host buffer stopped: {failure}") from failure
        return done

    def close(self) -> None:
        """After the copies that were asked for."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self, ready: Callable[[], None]) -> None:
        pin_thread(self._cpu_affinity, self._device)
        copies = self._begin()
        ready()
        try:
            while (job := self._jobs.get()) is not None:
                self._copy(copies, job)
        except Exception as error:
            logger.exception("the thread of copies died")
            self._failure = error
            self._wake()

    def _copy(self, copies: Copies, job: _Job) -> None:
        if job.downwards:
            copies.down(job.pairs)
        else:
            copies.up(job.pairs)
        if job.at_once is not None:
            job.at_once()
        self._done.append(job.done)
        self._wake()

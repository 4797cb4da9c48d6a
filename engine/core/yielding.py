"""Decode steps that yield to prompts which another engine on the same GPU has to compute.

Engines that share a GPU take turns on it: while both have work, each gets half of the time. A decode step of few
requests takes nearly as long as one of many, since it reads all weights. So a decode engine that runs as many steps as
it can halves the speed at which a prefill engine beside it computes prompts, and gains little from it: what it lacks
are requests. Here it begins its steps at a distance while prompts wait, and the other engine has the GPU in between.

Every engine tells the others how long its prompts will take (`DeviceBoard`). Steps with prompt tokens never yield.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

LEAST_BACKLOG_S = 0.1  # prompts of others that take less are not worth slower answers
LEAST_SHARE = 0.25  # of the time, for decode steps: after short ones the next one waits less


class DeviceBoard(Protocol):
    """The place where the engines on one GPU tell each other how long their prompts take."""

    def publish(self, backlog_s: float) -> None:
        """Tell the others how many seconds the prompts of this engine will take; 0: it has none."""
        ...

    def others_backlog_s(self) -> float:
        """Return the longest time that another engine's prompts will take."""
        ...

    def close(self) -> None: ...


class Yielding:
    """Decides how long the next decode step waits, and counts it."""

    def __init__(self, board: DeviceBoard, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`interval_s`: the longest time from the start of one decode step to the next, while it yields."""
        self._board = board
        self._interval_s = interval_s
        self._clock = clock
        self._launched_s = self._ended_s = -interval_s  # the newest step
        self._due_s = -interval_s  # until when a step had to wait the last time
        self.waited_s = 0.0  # since the start

    def publish(self, backlog_s: float) -> None:
        self._board.publish(backlog_s)

    def close(self) -> None:
        self._board.close()

    def launched(self) -> None:
        """Note that a step is launched now."""
        now = self._clock()
        if self._ended_s >= self._launched_s:  # none is in flight
            self.waited_s += max(0.0, min(self._due_s, now) - self._ended_s)
        self._launched_s = now

    def ended(self) -> None:
        """Note that no step is in flight any more."""
        self._ended_s = self._clock()

    def wait_s(self, step_s: float) -> float:
        """Return the seconds until the next decode step should be launched; 0: now. Such steps take `step_s`."""
        due_s, now = self._launched_s + min(self._interval_s, step_s / LEAST_SHARE), self._clock()
        if due_s <= now or self._board.others_backlog_s() < LEAST_BACKLOG_S:
            return 0.0
        self._due_s = due_s
        return due_s - now

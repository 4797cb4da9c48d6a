"""The stages that a request reaches in one engine, and their ages, for timelines across several engines.

An engine reports ages, not times: clocks of machines differ, but a duration is the same on all. Who gets the
message knows when it came, and so when each stage was, but for the message's own way.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable


class Stage(enum.StrEnum):
    QUEUED = "queued"  # it came
    CLAIMED = "claimed"  # its KV was asked for at the engine that has it, and is being read
    PULLED = "pulled"  # all bytes of it are here
    COMMITTED = "committed"  # and are its own
    STARTED = "started"  # its first step was planned


Ages = dict[Stage, float]  # in seconds


class Stages:
    """The stages of one request in this engine: when it first reached each, by one clock of this process."""

    __slots__ = ("_clock", "_reached_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic, came_s: float | None = None) -> None:
        """`came_s` is the request's arrival in this process, by default now."""
        self._clock = clock
        self._reached_s = {Stage.QUEUED: clock() if came_s is None else came_s}

    def reach(self, stage: Stage, at_s: float | None = None) -> None:
        """Note when a stage was reached, by default now. Only the first time counts."""
        if stage not in self._reached_s:
            self._reached_s[stage] = self._clock() if at_s is None else at_s

    @property
    def has_started(self) -> bool:
        """True once a step has run for the request."""
        return Stage.STARTED in self._reached_s

    def ages(self) -> Ages:
        """Return the age of each stage that it has reached."""
        now_s = self._clock()
        return {stage: now_s - at_s for stage, at_s in self._reached_s.items()}

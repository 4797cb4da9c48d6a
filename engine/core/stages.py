"""The stages that a request reaches in one engine, and their ages, for timelines across several engines.

An engine reports ages, not times: machines' clocks differ, but a duration is the same on all. The gateway knows when
the message arrived, and so when each stage was reached, give or take the message's own travel time.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable


class Stage(enum.StrEnum):
    QUEUED = "queued"  # the request arrived
    CLAIMED = "claimed"  # the claim for its KV was sent, and the READ began
    PULLED = "pulled"  # all bytes of its KV have arrived
    COMMITTED = "committed"  # its KV may be used
    STARTED = "started"  # its first step was planned


Ages = dict[Stage, float]  # in seconds


class Stages:
    """The times at which one request first reached each stage in this engine, by one clock of this process."""

    __slots__ = ("_clock", "_reached_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic, received_s: float | None = None) -> None:
        """Begin with `QUEUED`, reached at `received_s`, by default now."""
        self._clock = clock
        self._reached_s = {Stage.QUEUED: clock() if received_s is None else received_s}

    def reach(self, stage: Stage, at_s: float | None = None) -> None:
        """Note when a stage was reached, by default now. Only the first call for a stage counts."""
        if stage not in self._reached_s:
            self._reached_s[stage] = self._clock() if at_s is None else at_s

    @property
    def has_started(self) -> bool:
        """True once the request's first step was planned."""
        return Stage.STARTED in self._reached_s

    def ages(self) -> Ages:
        """Return the age of each stage that the request has reached."""
        now_s = self._clock()
        return {stage: now_s - at_s for stage, at_s in self._reached_s.items()}

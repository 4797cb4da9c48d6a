"""Decides whether the application still exists, by what its directory hears: a directory without members ends.

members send heartbeats ───────────────────────────> alive
all have left, or were seen to die ── NO_MEMBER_S ─> gone
some fell silent, or cannot be reached ── LOST_S ──> gone
"""

from __future__ import annotations

from collections.abc import Callable

NO_MEMBER_S = 30.0
# A link that is down ends no process, and members that come back could not talk to members of another directory, which
# has another cluster key. Ray gives a silent machine up, and ends its processes, after about a minute.
LOST_S = 150.0


class AppLiveness:
    """The signs of life that one directory has seen. Plain data: no Ray, no clock of its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_s = clock()
        self._some_are_lost = False

    def heard(self) -> None:
        """Note a sign of life of a member."""
        self._heard_s, self._some_are_lost = self._clock(), False

    def lost(self) -> None:
        """Note that a member is out of reach, and may be alive."""
        self._some_are_lost = True

    def excuse(self, stalled_s: float) -> None:
        """Leave out a time in which nothing could be heard, since this process stood still."""
        self._heard_s += stalled_s

    @property
    def is_gone(self) -> bool:
        return self._clock() - self._heard_s > (LOST_S if self._some_are_lost else NO_MEMBER_S)

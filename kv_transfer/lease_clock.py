"""The clock by which both sides of a hand-off count leases.

`time.monotonic` stops while a machine is suspended, but the other side's lease runs on. A reader that was suspended in
the middle of a read would wake up and still trust a lease whose blocks were reused long ago. This clock goes on.
"""

from __future__ import annotations

import math
import time

STOOD_STILL_S = 0.5  # a round that is later than this shows that the process was stopped, or starved of CPU
CATCH_UP_S = 1.0  # time after such a round for messages that waited in the kernel to reach Python


def lease_now() -> float:
    """Return the seconds since the machine booted, including those during which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def ahead_of_monotonic_s() -> float:
    """Return by how many seconds this clock is ahead of `time.monotonic`, the engine's clock."""
    return lease_now() - time.monotonic()


class Standstill:
    """Estimates how long messages may have waited because this process was stopped. Times are on the caller's clock.

    round, due again at T ──── stopped ────> late round ── CATCH_UP_S ──> as usual
                             arrivals count from T          arrivals count from now
    """

    def __init__(self) -> None:
        self._due = math.inf  # the latest time of this thread's next call
        self._since = self._caught_up_at = -math.inf

    def begin_round(self, now: float) -> None:
        self._compare(now)
        self._due = now

    def end_round(self, pause_s: float) -> None:
        """Expect the next round after `pause_s`, or sooner."""
        self._due += pause_s

    def arrival(self, now: float) -> float:
        """Return the earliest time at which a message that is read now may have arrived."""
        self._compare(now)
        return self._since if now < self._caught_up_at else now

    def _compare(self, now: float) -> None:
        if now - self._due > STOOD_STILL_S:
            self._since = self._due if now >= self._caught_up_at else min(self._since, self._due)
            self._caught_up_at = now + CATCH_UP_S

"""The clock by which leases are counted, on both sides of a hand-off.

`time.monotonic` stands still while a machine is suspended, and the other side's lease runs on: a reader that sleeps in
mid-read would wake up with most of a lease left whose blocks were used anew long ago. This one counts such time, too.
"""

from __future__ import annotations

import time


def lease_now() -> float:
    """Seconds since the machine's start, those in which it was suspended among them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def ahead_of_monotonic_s() -> float:
    """What to take off a time of this clock to have it by `time.monotonic`, by which engines count."""
    return lease_now() - time.monotonic()

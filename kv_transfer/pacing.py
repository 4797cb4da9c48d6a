"""Pauses of threads that move blocks. They must poll the transport, since it does not report the end of a read."""

from __future__ import annotations

import ctypes
import logging
import os

logger = logging.getLogger(__name__)

POLL_READS_S = 1e-4  # the longest pause while reads run ...
POLL_READS_SHARE = 0.1  # ... and a shorter one while they are young: this fraction of their age ...
POLL_GPU_READS_SHARE = 0.01  # ... or this fraction for GPU memory, since NVLink moves 40 MB in 100 us
POLL_GRANT_FOR_S = 5e-4  # for so long after a claim, poll for its grant without pause: waking up takes as long
POLL_WARMING_S = 1e-4  # the shortest pause while a peer is being connected; if that takes long:
POLL_WARMING_SHARE = 0.01  # this fraction of the time so far ...
POLL_LONG_WARMING_S = 0.1  # ... but no longer than this
POLL_SERVING_S = 1e-3  # while peers may read our memory: some lanes need our CPU
POLL_IDLE_S = 60.0

PR_SET_TIMERSLACK = 29  # of `linux/prctl.h`


def pause_s(
    now: float,
    reading_since: float | None,
    claimed_at: float | None,
    *,
    device: str,
    warming_since: float | None,
    serving: bool,
) -> float | None:
    """Return the seconds until the next poll of the transport. None: no poll is needed before an event.

    `reading_since` is when the newest read began, `claimed_at` when the newest unanswered claim was sent,
    `warming_since` when the newest peer began to connect. None: there is none. `device` is as in `ArenaRegion`.
    """
    if reading_since is not None:
        share = POLL_READS_SHARE if device == "cpu" else POLL_GPU_READS_SHARE
        return min(POLL_READS_S, share * max(0.0, now - reading_since))  # it may have begun after `now`, in this round
    if claimed_at is not None and now - claimed_at < POLL_GRANT_FOR_S:
        return 0.0
    at_most = POLL_SERVING_S if serving else POLL_LONG_WARMING_S
    if warming_since is not None:
        return min(at_most, max(POLL_WARMING_S, POLL_WARMING_SHARE * (now - warming_since)))
    return at_most if serving else None


def sleep_precisely() -> None:
    """Make the calling thread, and threads that it starts later, wake up on time.

    By default Linux lets a thread sleep 50 us longer, to wake the CPU less often. That is as long as one poll of a
    transport takes. If it cannot be changed, there is one warning.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0) != 0:
        logger.warning("the transfer thread's sleeps take 50 us longer: %s", os.strerror(ctypes.get_errno()))

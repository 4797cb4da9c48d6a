"""Pauses of threads that move blocks. A transport must be polled: it does not report the end of a read."""

from __future__ import annotations

import ctypes
import logging
import os

logger = logging.getLogger(__name__)

POLL_READS_S = 1e-4  # the longest pause while reads run ...
POLL_READS_SHARE = 0.1  # ... and shorter while they are young: this share of their age ...
POLL_GPU_READS_SHARE = 0.01  # ... or this one for a GPU's memory: over NVLink 100 us are 40 MB
POLL_GRANT_FOR_S = 5e-4  # a young claim's grant is polled without pause: waking up would take as long
POLL_WARMING_S = 1e-4  # the shortest pause while a peer is being connected; if that takes long:
POLL_WARMING_SHARE = 0.01  # this share of the time so far ...
POLL_LONG_WARMING_S = 0.1  # ... or this at most
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
    """Return the seconds until the transport should be polled again; None: not before an event.

    `reading_since` is when the youngest read began, `claimed_at` when the youngest unanswered claim was sent,
    `warming_since` when the youngest peer began to connect; each is None if there is none. `device`: see `ArenaRegion`.
    """
    if reading_since is not None:
        share = POLL_READS_SHARE if device == "cpu" else POLL_GPU_READS_SHARE
        return min(POLL_READS_S, share * max(0.0, now - reading_since))  # it may have begun in this very round
    if claimed_at is not None and now - claimed_at < POLL_GRANT_FOR_S:
        return 0.0
    at_most = POLL_SERVING_S if serving else POLL_LONG_WARMING_S
    if warming_since is not None:
        return min(at_most, max(POLL_WARMING_S, POLL_WARMING_SHARE * (now - warming_since)))
    return at_most if serving else None


def sleep_precisely() -> None:
    """Make the calling thread, and threads that it starts later, wake up on time.

    By default Linux lets a thread sleep 50 us longer, to wake the CPU more rarely: as long as polling a transport
    takes. If that cannot be changed there is one warning.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0) != 0:
        logger.warning("sleeps of the thread that moves blocks take 50 us longer: %s", os.strerror(ctypes.get_errno()))

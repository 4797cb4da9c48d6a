"""How soon a thread that moves blocks looks again. What a transport does is only known by asking it."""

from __future__ import annotations

import ctypes
import logging
import os

logger = logging.getLogger(__name__)

POLL_READS_S = 1e-4  # while reads run, at most ...
POLL_READS_SHARE = 0.1  # ... and sooner while they are young: at intervals of this share of their age ...
POLL_GPU_READS_SHARE = 0.01  # ... in a GPU's memory: over NVLink 100 us are 40 MB
POLL_GRANT_FOR_S = 5e-4  # a young claim's grant is looked for without pause: to be woken takes as long as it does
POLL_WARMING_S = 1e-4  # while a peer is being connected, and more rarely where that takes long:
POLL_WARMING_SHARE = 0.01  # at intervals of this share of the time so far ...
POLL_LONG_WARMING_S = 0.1  # ... at most
POLL_SERVING_S = 1e-3  # while someone may read us: some lanes need our CPU
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
    """Seconds until the transport should be asked again; None: not before something happens.

    `reading_since`: when the youngest read began, if one runs. `claimed_at`: when the youngest claim without an answer
    was sent, if one is. `warming_since`: when the youngest peer began to, if one connects. `device`: see `KVRegion`.
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
    """From now on the calling thread, and those that it starts, wake up when they asked to.

    Linux lets a thread sleep 50 us longer than it wants to, to wake the CPU more rarely: as long as a whole look at a
    transport takes. Where that cannot be changed there is one warning.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0) != 0:
        logger.warning("sleeps of the thread that moves blocks take 50 us longer: %s", os.strerror(ctypes.get_errno()))

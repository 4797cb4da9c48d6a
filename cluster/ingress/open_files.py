"""How many files a gateway may have open: one for each connection, and some for everything else."""

from __future__ import annotations

import logging
import os
import resource

logger = logging.getLogger(__name__)

MOST_RESERVED = 256  # for engines, Ray, the log, and connections that are accepted only to be refused


def max_descriptor(max_inflight_requests: int) -> int:
    """The highest file descriptor that a client's connection may have, after the process's limit has been raised as
    far as it may. The log says where that is too low for `max_inflight_requests`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    highest = hard - 1 - min(MOST_RESERVED, hard // 4)
    connections = highest + 1 - len(os.listdir("/proc/self/fd"))
    if connections < max_inflight_requests:
        logger.warning(
            "this process may have %d files open (ulimit -n), so about %d connections, and max_inflight_requests is "
            "%d: further connections are answered with 503. Raise the limit where Ray is started",
            hard,
            max(0, connections),
            max_inflight_requests,
        )
    return highest

"""How many files a gateway may have open: one for each connection, and some for everything else."""

from __future__ import annotations

import logging
import os
import resource
import sys
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MOST_RESERVED = 256  # for engines, Ray, the log, and connections that are accepted only to be refused


@dataclass(frozen=True)
class Descriptors:
    """The highest file descriptors that connections may have."""

    served: int = sys.maxsize
    accepted: int = sys.maxsize  # those above `served` are accepted to be refused


def raise_limit(max_inflight_requests: int) -> Descriptors:
    """Raise the process's limit as far as it may be; return what it allows.

    The log says where that is too low for `max_inflight_requests`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    reserved = min(MOST_RESERVED, hard // 4)
    served = hard - 1 - reserved
    connections = served + 1 - len(os.listdir("/proc/self/fd"))
    if connections < max_inflight_requests:
        logger.warning(
            "this process may have %d files open (ulimit -n), so about %d connections, and max_inflight_requests is "
            "%d: further connections are answered with 503. Raise the limit where Ray is started",
            hard,
            max(0, connections),
            max_inflight_requests,
        )
    return Descriptors(served, served + reserved // 2)

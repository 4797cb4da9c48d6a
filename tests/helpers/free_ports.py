"""Ports for programs that bind them later."""

from __future__ import annotations

import os
import random
import socket
from collections import deque

# Below the ports that the kernel gives to outgoing connections, one of which might take a port before its program has
# started, and above those that Ray gives to its workers. The ports after each one are left free, for gateways that
# count up from it.
CANDIDATES = range(20_000, 32_000, 8)

_returned: deque[int] = deque(maxlen=256)  # programs may not have bound them yet


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now, and that none of the last calls in this run of the tests returned.

    The processes of `pytest -n` divide the ports among themselves.
    """
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    number = max(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), 1)
    ports = sorted(set(CANDIDATES[own % number :: number]) - set(_returned))
    for port in random.SystemRandom().sample(ports, len(ports)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            _returned.append(port)
            return port
    raise AssertionError(f"none of {len(ports)} ports from {CANDIDATES} is free")

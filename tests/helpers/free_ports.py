"""Ports for programs that bind them later."""

from __future__ import annotations

import random
import socket

# Below the ports that the kernel gives to outgoing connections, one of which might take a port before its program has
# started, and above those that Ray gives to its workers. The ports after each one are left free, for gateways that
# count up from it.
CANDIDATES = range(20_000, 32_000, 8)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now. Tests that run at the same time hardly ever get the same one."""
    for port in random.SystemRandom().sample(CANDIDATES, 100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"none of 100 ports from {CANDIDATES} is free")

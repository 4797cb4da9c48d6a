"""Options that all ZeroMQ sockets between engines and gateways share: limits, and heartbeats.

A machine or a link that is lost closes no connection. So both ends send pings, which libzmq's own thread answers
however busy Python is in that process. A connection over which nothing has come for `heartbeat_timeout_s` is ended, as
if the other end had closed it.
"""

from __future__ import annotations

from typing import Any

import zmq

HEARTBEAT_TIMEOUT_S = 1.8  # by default: a lost engine is noticed in less than 2 s
MIN_HEARTBEAT_TIMEOUT_S = 0.5  # threads of a busy machine may wait that long for their turn
PINGS_PER_TIMEOUT = 5
MAX_SOCKETS = 1 << 14  # of a context: a connection takes three, and libzmq's own limit is 1023


def enable_heartbeat(socket: zmq.Socket[Any], heartbeat_timeout_s: float) -> None:
    """Make `socket` send pings and end silent connections. Call it before the socket binds or connects."""
    timeout_ms = round(heartbeat_timeout_s * 1000)
    ping_ms = timeout_ms // PINGS_PER_TIMEOUT
    socket.setsockopt(zmq.HEARTBEAT_IVL, ping_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms - ping_ms)  # libzmq counts from an unanswered ping on
    socket.setsockopt(zmq.TCP_MAXRT, timeout_ms)  # where so much is unsent that no ping goes out any more

"""Sockets between processes: endpoints, and the limits and heartbeats of all ZeroMQ sockets.

An endpoint is host:port. An IPv6 address is in brackets, as in URLs (RFC 3986).

If a machine or a link is lost, no connection is closed. So both ends send pings, which libzmq's own thread answers
however busy Python is in that process. A connection on which nothing has arrived for `heartbeat_timeout_s` is ended, as
if the other end had closed it.
"""

from __future__ import annotations

import socket
from typing import Any

import zmq

HEARTBEAT_TIMEOUT_S = 1.8  # default: a lost engine is noticed in less than 2 s
MIN_HEARTBEAT_TIMEOUT_S = 0.5  # threads on a busy machine may wait this long for their turn
MAX_HEARTBEAT_TIMEOUT_S = 3600.0
PINGS_PER_TIMEOUT = 5
MAX_SOCKETS = 1 << 14  # in a context: a connection takes three, and libzmq's default limit is 1023


def enable_heartbeat(socket: zmq.Socket[Any], heartbeat_timeout_s: float) -> None:
    """Make `socket` send pings and end silent connections. Call it before the socket binds or connects."""
    timeout_ms = round(heartbeat_timeout_s * 1000)
    ping_ms = timeout_ms // PINGS_PER_TIMEOUT
    socket.setsockopt(zmq.HEARTBEAT_IVL, ping_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms - ping_ms)  # libzmq counts from the first unanswered ping
    socket.setsockopt(zmq.TCP_MAXRT, timeout_ms)  # for a connection with so much unsent data that no ping gets out


def bind_to_free_port(socket: zmq.Socket[Any], host: str) -> str:
    """Bind a socket to a free port of `host`, and return its address, `tcp://HOST:PORT`. Raises `zmq.ZMQError`."""
    socket.ipv6 = is_ipv6(host)
    socket.bind(f"tcp://{endpoint(host, '*')}")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def is_ipv6(host: str) -> bool:
    """Return whether a host is an IPv6 address, rather than an IPv4 address or a name."""
    return ":" in host


def socket_family(host: str) -> socket.AddressFamily:
    """Return the family of a socket that is bound at `host`."""
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET


def endpoint(host: str, port: int | str) -> str:
    """Return `10.0.0.1:80` or `[::1]:80`. The port may be a wildcard."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def split_endpoint(given: str) -> tuple[str, int]:
    """Return the host and port of an endpoint. Raises `ValueError`."""
    host, _, port = given.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not (port.isascii() and port.isdigit()) or host != endpoint(bare, port).rpartition(":")[0]:
        raise ValueError(f"{given!r} is not host:port, such as 10.0.0.1:80 or [fd00::1]:80")
    return bare, int(port)


def is_ipv6_url(url: str) -> bool:
    """Return whether the host of `scheme://host:port` is an IPv6 address."""
    return url.partition("://")[2].startswith("[")

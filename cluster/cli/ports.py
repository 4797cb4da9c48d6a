"""The ports of `baton serve`: free when it starts, and claimed until it ends."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from baton.cluster.contracts import LoadBalancing
from baton.cluster.spec import FleetSpec
from baton.engine.net.endpoints import socket_family


class PortTaken(RuntimeError):
    """A gateway could not listen there. The message says what to change."""


@contextlib.contextmanager
def claimed_ports(spec: FleetSpec) -> Iterator[None]:
    """Claim the ports of the first machine's gateways against any other `baton serve` until the block ends.

    A gateway listens only when it can answer, and shares its port with others (SO_REUSEPORT): of two commands that
    start together each would find the port free, and then have half of the connections. So each claims its ports first.

    Raises `PortTaken`.
    """
    host, first = spec.gateway.host, spec.gateway.port
    count = spec.num_gateways(nodes=1) if spec.load_balancing is LoadBalancing.EXTERNAL else 1
    with contextlib.ExitStack() as claims:
        for port in range(first, first + count):
            claims.enter_context(_claim(host, port))
            _check_port_is_free(host, port)
        yield


def _claim(host: str, port: int) -> socket.socket:
    """Bind the port's number for UDP, which gateways do not use.

    The kernel gives it to one program, knows which addresses overlap (0.0.0.0 and 127.0.0.1), and frees it when the
    program ends, in whatever way.
    """
    claim = socket.socket(socket_family(host), socket.SOCK_DGRAM)
    taken = "another `baton serve` has it, or a program that takes UDP there"
    try:
        _bind(claim, host, port, taken)
    except PortTaken:
        claim.close()
        raise
    return claim


def _check_port_is_free(host: str, port: int) -> None:
    with socket.socket(socket_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(probe, host, port, "a program listens there")


def _bind(own: socket.socket, host: str, port: int, taken: str) -> None:
    try:
        own.bind((host, port))
    except OSError as error:
        why = taken if error.errno == errno.EADDRINUSE else error.strerror
        of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        change = (
            "stop it, or choose another port with --port" if of_port else "give an address of this machine as --host"
        )
        raise PortTaken(f"port {port} on {host} cannot be used ({why}): {change}") from None

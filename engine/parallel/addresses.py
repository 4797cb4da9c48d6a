"""Addresses of sockets between members: Unix sockets of this user within a machine, TCP between machines."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmq

from ..net.endpoints import endpoint, is_ipv6, is_ipv6_url
from .errors import GroupFailed
from .member import Member
from .watch import beat

_MAX_UNIX_PATH = 100
# Never, in effect. ZMQ's own never (-1) throws away what had arrived before a loss, and tells nobody that a connection
# could not be made; this it tells, and the watch ends who waits.
_NOT_SOON_MS = 3_600_000
_CONNECT_MS = 10_000  # to a machine, and as long for its word that it is a member


class Addresses:
    """The addresses of the sockets that one end binds."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._folder: Path | None = None
        self._num_paths = 0

    def bind(self, socket: zmq.Socket[Any], hosts: Iterable[str]) -> str:
        """Binds a socket that members at `hosts` connect to, and gives its address. Raises `GroupFailed`."""
        member = self._member
        if all(host == member.host for host in hosts):
            path = self._new_path()
            if len(path) < _MAX_UNIX_PATH:
                socket.bind(f"ipc://{path}")
                return f"ipc://{path}"
        beat(socket)
        if member.secure_server is not None:
            member.secure_server(socket)
        socket.ipv6 = is_ipv6(member.host)
        try:
            socket.bind(f"tcp://{endpoint(member.host, '*')}")
        except zmq.ZMQError as error:
            raise GroupFailed(f"rank {member.rank} cannot listen at {member.host}: {error}") from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def remove(self) -> None:
        """Nobody finds them any more; who is connected stays so. A process that is killed behind it leaves no files."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _new_path(self) -> str:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="baton-"))  # for this user only
        self._num_paths += 1
        return str(self._folder / str(self._num_paths))


def connect(socket: zmq.Socket[Any], address: str, member: Member) -> None:
    """To what another member has bound; once: what came after a loss would seem to follow what came before it.

    Where nobody answers, `Watch.wait_connected` says so at once.
    """
    socket.reconnect_ivl = _NOT_SOON_MS
    socket.handshake_ivl = _CONNECT_MS
    if address.startswith("tcp:"):
        beat(socket)
        socket.connect_timeout = _CONNECT_MS
        socket.ipv6 = is_ipv6_url(address)
        if member.secure_client is not None:
            member.secure_client(socket)
    socket.connect(address)

"""Liveness of other ranks: a socket is connected to each; heartbeats detect lost machines."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..net.wakeup import WakeupSocket
from .groups import CollectiveFailed, GroupFailed

_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 5000
_LOOK_MS = 50
_ENDS = (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_DISCONNECTED)  # a retry means failure: the connecting end tries once


class Watch:
    """Reports, once, that the other end of one of several sockets has gone.

    Only sockets that connect can be watched. For a bound socket, libzmq does not report which connection has ended, and
    any process may connect to it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], on_loss: Callable[[str], None]) -> None:
        """Watch no socket yet. `on_loss` is called with the name of the lost end, on this watch's thread."""
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._on_loss = on_loss
        self._wakeup = WakeupSocket(context)
        self._thread = threading.Thread(target=self._run, name="baton-group-watch", daemon=True)

    def add(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Watch a socket whose other end is `name`. Call it before the socket connects, so that no event is missed."""
        self._monitors[socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | sum(_ENDS))] = name

    def wait_connected(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait for all connections, before `start`. `check` raises if waiting is pointless. Raises `GroupFailed`.

        `CollectiveFailed` means that another rank may report the reason: one that does not answer may have failed.
        """
        deadline = time.monotonic() + timeout_s
        missing = dict(self._monitors)
        poller = _poller(self._monitors)
        while missing:
            check()
            if time.monotonic() > deadline:
                raise GroupFailed(f"{', '.join(missing.values())} did not connect within {timeout_s:g} s")
            for monitor, _ in poller.poll(_LOOK_MS):
                message = recv_monitor_message(monitor)
                if message["event"] in _ENDS:
                    name, address = self._monitors[monitor], message["endpoint"].decode()
                    raise _no_member(name, address) if monitor in missing else CollectiveFailed(f"{name} has gone")
                missing.pop(monitor)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. The sockets' context closes them afterwards."""
        self._wakeup.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        poller = _poller([self._wakeup.socket, *self._monitors])
        while True:
            ready = [socket for socket, _ in poller.poll()]
            if self._wakeup.socket in ready:
                break
            if lost := [
                self._monitors[monitor] for monitor in ready if recv_monitor_message(monitor)["event"] in _ENDS
            ]:
                self._on_loss(lost[0])
                break


def _poller(sockets: Iterable[zmq.Socket[bytes]]) -> zmq.Poller:
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    return poller


def _no_member(name: str, address: str) -> CollectiveFailed:
    return CollectiveFailed(
        f"{name} did not connect: no member of this group answers at {address}. Ranks of one machine must share its "
        f"{tempfile.gettempdir()}, those of several must reach each other's TCP ports, and all need the same cluster "
        "key"
    )


def beat(socket: zmq.Socket[Any]) -> None:
    """Send heartbeats, because a lost machine closes no connection."""
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS

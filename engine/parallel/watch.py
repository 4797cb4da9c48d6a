"""How each end of a pair of sockets knows that the other lives: at once, and between machines by heartbeats."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from .errors import GroupFailed

_HEARTBEAT_MS, _SILENCE_MS = 1000, 5000
_NO_MEMBER = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | _NO_MEMBER


class Watch:
    """Learns that the other end of one of some sockets has gone, and says so once."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], on_loss: Callable[[str], None]) -> None:
        """`on_loss` is called on a thread of this watch, with the name of who has gone."""
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._refused: set[zmq.Socket[bytes]] = set()  # monitors that tell next how a stranger's connection ends
        self._on_loss = on_loss
        self._bell, self._ringer = inproc_pair(context)
        self._thread = threading.Thread(target=self._run, name="baton-group-watch", daemon=True)

    def add(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Watches a socket, with `name` at its other end. Comes before it binds or connects: nothing may be missed."""
        self._monitors[socket.get_monitor_socket(_EVENTS)] = name

    def wait_connected(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Comes before `start`. `check` raises where waiting has become pointless. Raises `GroupFailed`."""
        deadline = time.monotonic() + timeout_s
        for monitor, name in self._monitors.items():
            while not self._is_connected(monitor, name):
                check()
                if time.monotonic() > deadline:
                    raise GroupFailed(f"{name} did not connect within {timeout_s:g} s")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """The sockets' context closes them afterwards."""
        with contextlib.suppress(zmq.Again):  # nobody listens: the watch has said what it had to, or never began
            self._ringer.send(b"", zmq.NOBLOCK)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._bell, *self._monitors):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell in ready:
                break
            lost = [name for monitor, name in self._monitors.items() if monitor in ready and self._is_lost(monitor)]
            if lost:
                self._on_loss(lost[0])
                break

    @staticmethod
    def _is_connected(monitor: zmq.Socket[bytes], name: str) -> bool:
        """Waits a little. Raises `GroupFailed` where an attempt has failed: whoever connects tries once."""
        if not monitor.poll(50):
            return False
        message = recv_monitor_message(monitor)
        if message["event"] == zmq.EVENT_CONNECT_RETRIED:
            raise GroupFailed(
                f"{name} did not connect: no member of this group answers at {message['endpoint'].decode()}. Ranks of"
                f" one machine must share its {tempfile.gettempdir()}, those of several must reach each other's TCP"
                " ports, and all need the same cluster key"
            )
        return message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _is_lost(self, monitor: zmq.Socket[bytes]) -> bool:
        """A member is, and not somebody who has only knocked at the port: that has never shaken hands."""
        event = recv_monitor_message(monitor)["event"]
        if event & _NO_MEMBER:
            self._refused.add(monitor)
        if event != zmq.EVENT_DISCONNECTED:
            return False
        known = monitor not in self._refused
        self._refused.discard(monitor)
        return known


def beat(socket: zmq.Socket[Any]) -> None:
    """A machine that goes says nothing."""
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _SILENCE_MS


def inproc_pair(context: zmq.Context[Any]) -> Sequence[zmq.Socket[bytes]]:
    """Two ends, the second of which may be used by another thread."""
    ends = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    address = f"inproc://{id(ends[0])}"
    ends[0].bind(address)
    ends[1].connect(address)
    return ends

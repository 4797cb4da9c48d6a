"""How each end of a pair of sockets knows that the other lives: at once, and between machines by heartbeats."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from .errors import GroupFailed

_HEARTBEAT_MS, _SILENCE_MS = 1000, 5000


class Watch:
    """Learns that the other end of one of some sockets has gone, and says so once."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], on_loss: Callable[[str], None]) -> None:
        """`on_loss` is called on a thread of this watch, with the name of who has gone."""
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._on_loss = on_loss
        self._bell, self._ringer = inproc_pair(context)
        self._thread = threading.Thread(target=self._run, name="baton-group-watch", daemon=True)

    def add(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Watches a socket, with `name` at its other end. Comes before it binds or connects: nothing may be missed."""
        self._monitors[socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)] = name

    def wait_connected(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Comes before `start`. `check` raises where waiting has become pointless. Raises `GroupFailed`."""
        deadline = time.monotonic() + timeout_s
        for monitor, name in self._monitors.items():
            while not (monitor.poll(50) and recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED):
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
            events = [
                (name, recv_monitor_message(monitor)) for monitor, name in self._monitors.items() if monitor in ready
            ]
            lost = [name for name, message in events if message["event"] == zmq.EVENT_DISCONNECTED]
            if lost:
                self._on_loss(lost[0])
                break


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

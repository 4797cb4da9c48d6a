"""Wake-ups of a thread that waits for ZMQ sockets."""

from __future__ import annotations

import contextlib
from typing import Any

import zmq


class WakeupSocket:
    """Ends another thread's wait: the waiting thread polls `socket`, too, and `wake` makes it readable.

    Both ends belong to `context`, which closes them.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._sender: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        address = f"inproc://wakeup-{id(self)}"
        self.socket.bind(address)
        self._sender.connect(address)

    def wake(self) -> None:
        """Make `socket` readable. Threads must not call this at the same time."""
        with contextlib.suppress(zmq.Again):  # a thousand wake-ups are already queued
            self._sender.send(b"", zmq.NOBLOCK)

    def drain(self) -> None:
        """Forget all wake-ups so far. Only the waiting thread may call this."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.socket.recv(zmq.NOBLOCK)

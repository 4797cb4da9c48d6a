"""Threads that own what they open and are its only users: a transport, sockets, a copier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from .channel import ZmqChannel
from .errors import TransportError

Work = Callable[[Callable[[], None]], None]


class OwnerThread(threading.Thread):
    """Runs `work(ready)`, which opens its resources, calls `ready`, and returns when `end` was called."""

    def __init__(self, name: str, work: Work) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._ready: Future[None] = Future()

    def open(self, timeout_s: float | None = None) -> None:
        """Start the thread and wait until it is ready. Raises an earlier error of `work`, or `TimeoutError`."""
        self.start()
        self._ready.result(timeout_s)

    def run(self) -> None:
        try:
            self._work(lambda: self._ready.set_result(None))
        except Exception as error:
            if self._ready.done():  # `open` has returned: Python's hook logs it
                raise
            self._ready.set_exception(error)
        finally:
            del self._work  # as `Thread` does with its target: an ended thread keeps no memory alive


class ChannelThread(OwnerThread):
    """The only user of a channel, which it closes when it ends."""

    def __init__(self, name: str, channel: ZmqChannel, work: Work) -> None:
        """`work` waits at the channel, and checks `is_closing` whenever it is woken."""
        super().__init__(name, work)
        self._channel = channel
        self._closing = threading.Event()
        self._closed = False

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def open(self, timeout_s: float | None = None) -> None:
        """Start as `OwnerThread` does. A failure closes the channel; a timeout is a `TransportError`."""
        try:
            super().open(timeout_s)
        except Exception as error:
            if isinstance(error, TimeoutError) and not self._ready.done():
                self._closing.set()  # it is stuck inside the transport, and ends by itself when that returns
                raise TransportError(f"the transport did not start within {timeout_s:g} s") from None
            self.close()
            raise

    def end(self) -> None:
        """Ask the thread to end, without waiting."""
        if not self._closing.is_set():
            self._closing.set()
            self._channel.wake()

    def close(self) -> None:
        """Wait for the thread's end and close the channel. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.end()
            self.join()
            self._channel.close()

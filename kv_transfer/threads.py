"""Threads that open a resource and are its only users: a transport, sockets, a copier."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future

from .channel import ZmqChannel
from .errors import TransportError

logger = logging.getLogger(__name__)

Work = Callable[[Callable[[], None]], None]

# The transfer thread waits 5 s of these for running reads (`connector.py`), then its transport deregisters the memory.
CLOSE_TIMEOUT_S = 30.0


class OwnerThread(threading.Thread):
    """Runs `work(ready)`, which opens its resources, calls `ready`, and goes on until it is asked to end."""

    def __init__(self, name: str, work: Work) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._ready: Future[None] = Future()

    def open(self, timeout_s: float | None = None) -> None:
        """Start the thread and wait until `work` calls `ready`. Raises its error, or `TimeoutError`."""
        self.start()
        self._ready.result(timeout_s)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for the thread's end. Returns False, and logs where it is, if it has not ended by then."""
        self.join(timeout_s)
        if not self.is_alive():
            return True
        frame = sys._current_frames().get(self.ident or 0)
        place = "no Python code" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
        logger.error("the thread %s has not ended within %g s, it is left in:\n%s", self.name, timeout_s, place)
        return False

    def run(self) -> None:
        try:
            self._work(lambda: self._ready.set_result(None))
        except Exception as error:
            if self._ready.done():  # `open` has returned, so `threading.excepthook` reports the error
                raise
            self._ready.set_exception(error)
        finally:
            del self._work  # as `Thread` deletes its target, so that an ended thread keeps no memory alive


class ChannelThread(OwnerThread):
    """A thread that is the only user of a channel. `close` closes the channel, too."""

    def __init__(self, name: str, channel: ZmqChannel, work: Work) -> None:
        """`work` must wait at the channel, and check `is_closing` whenever it wakes up."""
        super().__init__(name, work)
        self._channel = channel
        self._closing = threading.Event()
        self._closed = False

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def open(self, timeout_s: float | None = None) -> None:
        """Start as `OwnerThread` does. A failure closes the channel, and a timeout raises `TransportError`."""
        try:
            super().open(timeout_s)
        except Exception as error:
            if isinstance(error, TimeoutError) and not self._ready.done():
                self._closing.set()  # it hangs in the transport, and ends when that returns
                raise TransportError(f"the transport did not start within {timeout_s:g} s") from None
            self.close()
            raise

    def end(self) -> None:
        """Ask the thread to end, without waiting."""
        if not self._closing.is_set():
            self._closing.set()
            self._channel.wake()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait for the thread's end and close the channel. Once that is done, a second call does nothing.

        Returns False, and logs where the thread is, if it has not ended in time. It may still use what it has opened,
        and the channel, which stays open.
        """
        if not self._closed:
            self.end()
            if not self.ends_within(timeout_s):
                return False
            self._closed = True
            self._channel.close()
        return True

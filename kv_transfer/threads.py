"""Threads that alone use what they open: a transport, sockets, copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from .errors import TransportError
from .net.channel import ZmqChannel

Work = Callable[[Callable[[], None]], None]


class OwnerThread(threading.Thread):
    """Runs `work(ready)`, which opens what it uses, calls `ready`, and returns when it has been told to end."""

    def __init__(self, name: str, work: Work) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._ready: Future[None] = Future()

    def open(self, timeout_s: float | None = None) -> None:
        """Starts it, and returns when it is ready. Raises what `work` raises before, or `TimeoutError`."""
        self.start()
        self._ready.result(timeout_s)

    def run(self) -> None:
        try:
            self._work(lambda: self._ready.set_result(None))
        except Exception as error:
            if self._ready.done():  # nobody waits for it any more: Python's hook says so
                raise
            self._ready.set_exception(error)
        finally:
            del self._work  # as `Thread` does with its target: a thread that is over keeps nobody's memory


class ChannelThread(OwnerThread):
    """The one that uses a channel, until it is closed."""

    def __init__(self, name: str, channel: ZmqChannel, work: Work) -> None:
        """`work` waits at the channel, and looks at `is_closing` whenever it is woken."""
        super().__init__(name, work)
        self._channel = channel
        self._closing = threading.Event()
        self._closed = False

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def open(self, timeout_s: float | None = None) -> None:
        """As above. Where it fails the channel is closed; a thread that takes too long is a `TransportError`."""
        try:
            super().open(timeout_s)
        except Exception as error:
            if isinstance(error, TimeoutError) and not self._ready.done():
                self._closing.set()  # it is stuck inside the transport, and leaves by itself when it comes back
                raise TransportError(f"the transport did not start within {timeout_s:g} s") from None
            self.close()
            raise

    def end(self) -> None:
        """Asks it to, and does not wait."""
        if not self._closing.is_set():
            self._closing.set()
            self._channel.wake()

    def close(self) -> None:
        """Waits for its end, and closes the channel. Closing twice changes nothing."""
        if not self._closed:
            self._closed = True
            self.end()
            self.join()
            self._channel.close()

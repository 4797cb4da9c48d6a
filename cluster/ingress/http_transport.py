"""The transports to which answers are written: one of the connection, and one of each answer.

asyncio keeps a connection open after `close` until the client has read what was written before. One that never reads
would keep its file descriptor for ever, as would one whose answer waits for it without a deadline.

    writing ── its buffer is full ──────────> waiting for the client ── nothing read for STALLED_S ──> aborted
       └────── closed, with unsent bytes ──────────> closing ────────── nothing read for UNREAD_S ───> aborted
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import Any

UNREAD_S = 30.0  # in which the client of a closed connection must read something
STALLED_S = 600.0  # the same, while an answer is being sent; requests to engines have deadlines of their own


class WatchedTransport:
    """The transport of a connection. It breaks the connection off if the client reads nothing for a while.

    Bytes count as read once the client's kernel has acknowledged them.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._num_written = 0
        self._check: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        self._num_written += len(data)
        self._transport.write(data)

    def write_eof(self) -> None:
        self._transport.write_eof()

    def close(self) -> None:
        if self._transport.is_closing():
            return
        self._transport.close()
        self.unwatch()
        if self._transport.get_write_buffer_size():
            self._watch(UNREAD_S)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def watch(self) -> None:
        """Watch the client, for which an answer waits. A closed connection is watched anyway."""
        if not self._transport.is_closing():
            self._watch(STALLED_S)

    def unwatch(self) -> None:
        """Stop watching: the client has read, or the connection is lost."""
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def _watch(self, seconds: float) -> None:
        self.unwatch()
        self._check = self._loop.call_later(seconds, self._abort_unless_read, seconds, self._num_read())

    def _abort_unless_read(self, seconds: float, num_read_before: int) -> None:
        self._check = None
        if self._num_read() == num_read_before:
            self._transport.abort()
        else:
            self._watch(seconds)

    def _num_read(self) -> int:
        """Return the number of bytes that the client has acknowledged, plus a constant."""
        descriptor = self._transport.get_extra_info("socket").fileno()
        (unacknowledged,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, struct.pack("i", 0)))
        return self._num_written - self._transport.get_write_buffer_size() - unacknowledged


class HeadWithBody:
    """The transport of one answer. It holds the first piece back until the second one, or the loop's next turn."""

    def __init__(self, transport: asyncio.Transport | WatchedTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held = b""
        self._begun = False

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun, self._held = True, data
            self._loop.call_soon(self._release)
        elif self._held:
            held, self._held = self._held, b""
            self._transport.write(held + data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._release()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _release(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

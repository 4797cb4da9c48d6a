"""The signals that end `baton serve`, and its exit code.

SERVING ──SIGINT, SIGTERM, SIGHUP──> STOPPING   everything ends in order
                                        └──SIGINT, SIGTERM once more──> everything is killed

SIGHUP never counts as the second signal: shells and kernels repeat it, and systemd may send it along with SIGTERM
(`SendSIGHUP`). If it was ignored from the start (nohup), it stays ignored.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TextIO

STDOUT, STDERR = 1, 2
READER_GONE = (errno.EIO, errno.EPIPE)  # when a terminal was closed, or the reader of a pipe has ended


class StopSignals:
    """Signals that ask this command to end, handled from `listen` on. The second one calls `kill`."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.asked = threading.Event()
        self.code = 0  # exit code, valid once `asked` is set
        self._kill = kill
        self._insisted = False
        self._terminals = [descriptor for descriptor in (STDOUT, STDERR) if os.isatty(descriptor)]

    def listen(self) -> None:
        """Install the handlers. Call it in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_hangup)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._insisted:
            self._kill()
            os._exit(128 + number)
        self._insisted = True
        signal.alarm(0)  # cancels an abort in 3 s: while Ray starts, its library may handle SIGTERM first
        self.code = 0 if number == signal.SIGTERM else 128 + number
        self.asked.set()
        with contextlib.suppress(OSError):  # the terminal is closed
            os.write(STDERR, b"\nStopping (once more to kill) ...\n")

    def _on_hangup(self, number: int, _: FrameType | None) -> None:
        for descriptor in self._terminals:
            redirect_to_null(descriptor)
        if not self.asked.is_set():
            self.code = 128 + number
            self.asked.set()


class TolerantOutput(io.TextIOBase):
    """A stream whose reader may disappear: from then on, output is dropped without an error.

    A terminal that closes refuses output even before its SIGHUP arrives.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._unless_gone(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_gone(self._stream.flush)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def _unless_gone(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno not in READER_GONE:
                raise
            redirect_to_null(self._stream.fileno())


def redirect_to_null(descriptor: int) -> None:
    """Make a descriptor write to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)

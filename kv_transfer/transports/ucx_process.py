"""UCX's environment and log in this process.

UCX takes its settings from the environment when its library is loaded and when a context is made. Variables that are
set here are set only for that time: child processes do not inherit them.

UCX decides at run time how a peer's memory is read (shared memory, InfiniBand, TCP) and tells it only in its own log.
That log goes to a file in memory, from which the chosen lanes, once each, and the warnings go into Python's log. Where
UCX_LOG_FILE or UCX_LOG_LEVEL is set already, UCX's log is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

_LANES = re.compile(r"UCX  INFO\s+(?P<lanes>.*cfg#\d+.*)")
_TROUBLE = re.compile(r"UCX  (?P<level>WARN|ERROR|FATAL)\s+(?P<text>.*)")


# UCX's own probes keep a TCP connection whose other end was lost in mid-read from timing out: the kernel would give it
# up only after a quarter of an hour, and the read's blocks would be kept as long.
LOST_TCP = {"UCX_TCP_USER_TIMEOUT": "10s"}


@contextlib.contextmanager
def environment_defaults(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, except those that are set already."""
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


class UcxLog:
    """UCX's log of this process. One thread uses it."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._offset = 0
        self._rest = b""
        self.lanes: list[str] = []  # in UCX's words, in the order in which they were chosen

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Direct UCX's log to this object; UCX must be loaded inside the context."""
        has_log = bool({"UCX_LOG_FILE", "UCX_LOG_LEVEL"} & os.environ.keys()) or self._fd is not None
        with environment_defaults({} if has_log else self._settings()):
            yield

    def drain(self) -> None:
        """Log what UCX has written since the last call."""
        if self._fd is None:
            return
        ctypes.CDLL(None).fflush(None)  # UCX's stream is buffered, and only the C library knows it
        while chunk := os.pread(self._fd, 1 << 16, self._offset):
            self._offset += len(chunk)
            self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._report(line.decode(errors="replace"))

    def _settings(self) -> dict[str, str]:
        self._fd = os.memfd_create("ucx-log")
        return {"UCX_LOG_FILE": f"/proc/self/fd/{self._fd}", "UCX_LOG_LEVEL": "info"}

    def _report(self, line: str) -> None:
        if (found := _LANES.search(line)) and found["lanes"] not in self.lanes:
            self.lanes.append(found["lanes"])
            logger.info("UCX lanes: %s", found["lanes"])
        elif found := _TROUBLE.search(line):
            logger.log(logging.WARNING if found["level"] == "WARN" else logging.ERROR, "UCX: %s", found["text"])

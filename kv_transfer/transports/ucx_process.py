"""UCX's environment and log in this process.

UCX reads its settings from the environment when its library is loaded and when a context is made. We set variables only
for that time, so that child processes do not inherit them.

UCX decides at run time how it reads a peer's memory (shared memory, InfiniBand, TCP) and reports that only in its own
log. We direct that log to a file in memory, and copy its warnings and each chosen lane into Python's log. If
UCX_LOG_FILE or UCX_LOG_LEVEL is already set, UCX's log is left alone.
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


# If the other end of a TCP connection is lost during a read, UCX's own probes keep the connection from timing out. The
# kernel would give it up after a quarter of an hour, and the blocks of the read would stay quarantined until then.
LOST_TCP = {"UCX_TCP_USER_TIMEOUT": "10s"}


@contextlib.contextmanager
def environment_defaults(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, except those that are already set."""
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
        self.lanes: list[str] = []  # as UCX logs them, in the order of its choice

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Direct UCX's log to this object. UCX must be loaded inside the context."""
        has_log = bool({"UCX_LOG_FILE", "UCX_LOG_LEVEL"} & os.environ.keys()) or self._fd is not None
        with environment_defaults({} if has_log else self._settings()):
            yield

    def drain(self) -> None:
        """Copy what UCX has written since the last call into Python's log."""
        if self._fd is None:
            return
        ctypes.CDLL(None).fflush(None)  # UCX writes to a buffered C stream
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

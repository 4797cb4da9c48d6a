"""Progress of downloads from the Hub: the library's bars on a terminal, else log lines. Also Ctrl-C meanwhile."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from huggingface_hub import close_session
from huggingface_hub.utils import tqdm

logger = logging.getLogger(__name__)

LOG_S = 10.0  # between two log lines
GB = 1e9


class NoBar(tqdm):
    """A bar that draws nothing, and occupies no line of the terminal."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **{**given, "disable": True})


def bar_class(model: str, progress: Callable[[str], None] | None, stop: threading.Event) -> type[tqdm]:
    """Return a class for the bars of `snapshot_download`. The bars raise `InterruptedError` once `stop` is set.

    Without a terminal, the bar of received bytes logs a line every `LOG_S` seconds and calls `progress` with it; other
    bars show nothing.
    """

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise InterruptedError("the download was interrupted")
            return super().update(n)

    class LoggedBar(Bar):
        def __init__(self, *args: Any, **given: Any) -> None:
            self._began_s = time.monotonic()
            logged = {"disable": False, "file": io.StringIO(), "miniters": 1, "mininterval": LOG_S}
            super().__init__(*args, **{**given, **logged})

        def display(self, *args: Any, **given: Any) -> None:
            """Log the state. tqdm calls it every `mininterval` seconds, and when a bar begins or ends."""
            if self.unit != "B" or not self.desc.startswith("Downloading") or self.n == 0:
                return
            rate = (self.n - self.initial) / (time.monotonic() - self._began_s)
            total = max(self.n, self.total or 0)  # only files whose download has begun are counted
            line = f"fetches {model}: {self.n / GB:.2f} of {total / GB:.2f} GB asked for so far, {rate / 1e6:.0f} MB/s"
            logger.info(line)
            if progress is not None:
                progress(line)

    return Bar if sys.stderr.isatty() else LoggedBar


@contextlib.contextmanager
def stopping_at_ctrl_c() -> Iterator[threading.Event]:
    """Set the yielded event at the first SIGINT, and end this process at the second.

    With `KeyboardInterrupt` alone, the process would wait until the library's threads have finished their files.
    """
    stop = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield stop
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        close_session()  # ends connections that wait for data
        before(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)

"""The progress of downloads from the Hub: bars of the library on a terminal, lines of a log elsewhere."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from huggingface_hub.utils import tqdm

logger = logging.getLogger(__name__)

LOG_S = 10.0  # between two lines
GB = 1e9


class NoBar(tqdm):
    """A bar that shows nothing, and takes no line of the terminal."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **{**given, "disable": True})


def bar_class(model: str, progress: Callable[[str], None] | None) -> type[tqdm] | None:
    """Return the class of the bars of `snapshot_download`; None on a terminal, for its own.

    The bar of received bytes logs a line every `LOG_S` seconds, which `progress` gets, too; others do nothing.
    """
    if sys.stderr.isatty():
        return None

    class LoggedBar(tqdm):
        def __init__(self, *args: Any, **given: Any) -> None:
            self._began_s = time.monotonic()
            logged = {"disable": False, "file": io.StringIO(), "miniters": 1, "mininterval": LOG_S}
            super().__init__(*args, **{**given, **logged})

        def display(self, *args: Any, **given: Any) -> None:
            """Tell the state. tqdm calls it after `mininterval` seconds, and where a bar begins or ends."""
            if self.unit != "B" or not self.desc.startswith("Downloading") or self.n == 0:
                return
            rate = (self.n - self.initial) / (time.monotonic() - self._began_s)
            total = max(self.n, self.total or 0)  # of files that have begun
            line = f"fetches {model}: {self.n / GB:.2f} of {total / GB:.2f} GB asked for so far, {rate / 1e6:.0f} MB/s"
            logger.info(line)
            if progress is not None:
                progress(line)

    return LoggedBar

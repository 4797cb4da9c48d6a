"""The progress of downloads from the Hub: bars of the library on a terminal, lines of a log elsewhere."""

from __future__ import annotations

import io
import logging
import sys
import time
from typing import Any

from huggingface_hub.utils import tqdm

logger = logging.getLogger(__name__)

LOG_S = 10.0  # between two lines
GB = 1e9


def bar_class(model: str) -> type[tqdm] | None:
    """Return the class of `snapshot_download`'s bars; None on a terminal, for its own."""
    if sys.stderr.isatty():
        return None

    class LoggedBar(_LoggedBar):
        name = model

    return LoggedBar


class _LoggedBar(tqdm):
    """Logs the bytes that have arrived, and their rate. Of the library's bars, only that of received bytes does."""

    name: str

    def __init__(self, *args: Any, **given: Any) -> None:
        self._began_s = time.monotonic()
        super().__init__(
            *args, **{**given, "disable": False, "file": io.StringIO(), "miniters": 1, "mininterval": LOG_S}
        )

    def display(self, *args: Any, **given: Any) -> None:
        """Log a line. tqdm calls it after `mininterval` seconds, and where a bar begins or ends."""
        if self.unit == "B" and self.desc.startswith("Downloading") and self.n > 0:
            rate = (self.n - self.initial) / (time.monotonic() - self._began_s)
            total = max(self.n, self.total or 0)  # files that have not begun are not in it yet
            size = f"{self.n / GB:.2f} of {total / GB:.2f} GB or more"
            logger.info("fetching %s: %s, %.0f MB/s", self.name, size, rate / 1e6)

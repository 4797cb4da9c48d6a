"""Ctrl-C between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptAfter:
    """Ctrl-C waits for the end of this context: in the middle of a step it would lose a plan whose results the
    scheduler then expects for ever. A second one comes through at once, for whoever would not wait.

    It does nothing in threads other than the main one, which Python never interrupts, and where somebody else handles
    Ctrl-C.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: Any = None

    def __enter__(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        if self._came:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True

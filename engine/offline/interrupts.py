"""Signals between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_HELD = (signal.SIGINT, signal.SIGTERM)


class SignalsAfter:
    """Ctrl-C and SIGTERM, where Python handles them, wait for the end of this context: a handler that raises in the
    middle of a step would lose a plan whose results the scheduler then expects for ever. A second one comes through at
    once, for whoever would not wait.

    It does nothing in threads other than the main one, which Python never interrupts.
    """

    def __init__(self) -> None:
        self._came: dict[int, FrameType | None] = {}
        self._handlers: dict[int, Any] = {}  # those that wait

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in _HELD}
            self._handlers = {number: handler for number, handler in found.items() if callable(handler)}
            for number in self._handlers:
                signal.signal(number, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number, frame in self._came.items():
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._came:
            self._handlers[number](number, frame)
        self._came[number] = frame

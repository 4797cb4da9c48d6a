"""Signals that arrive in the middle of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_DELAYED = (signal.SIGINT, signal.SIGTERM)


class DelayedSignals:
    """A context that delays Ctrl-C and SIGTERM to its end, if Python handles them.

    A handler that raises in the middle of a step would lose a plan, for whose result the scheduler would wait forever.
    A second signal is not delayed.

    In threads other than the main one it does nothing, since Python never interrupts them.
    """

    def __init__(self) -> None:
        self._came: dict[int, FrameType | None] = {}
        self._handlers: dict[int, Any] = {}  # the delayed handlers, by signal

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in _DELAYED}
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

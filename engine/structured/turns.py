"""Threads one after the other, in the order in which they came. A lock of Python's promises no order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Any thread may ask for one. None may within its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[threading.Event] = deque()  # the first has its turn

    @property
    def num_in_line(self) -> int:
        return len(self._line)

    @contextmanager
    def turn(self) -> Iterator[None]:
        mine = threading.Event()
        with self._lock:
            self._line.append(mine)
            self._line[0].set()
        mine.wait()
        try:
            yield
        finally:
            with self._lock:
                self._line.popleft()
                if self._line:
                    self._line[0].set()

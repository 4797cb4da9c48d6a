"""Event counts over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

PARTS = 10  # of a window; events are forgotten one part at a time


class SlidingWindow:
    """Counts two kinds of events within the last `seconds`, in constant memory."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._part_s = seconds / PARTS
        self._clock = clock
        self._parts: deque[tuple[int, list[int]]] = deque()  # a part's number since the clock's zero, and both counts
        self._sums = [0, 0]

    @property
    def num_parts(self) -> int:
        """The number of parts that hold counts, at most `PARTS`."""
        return len(self._parts)

    def add(self, kind: int, count: int = 1) -> None:
        """Count events of a kind, which is 0 or 1."""
        number = self._forget()
        if not self._parts or self._parts[-1][0] != number:
            self._parts.append((number, [0, 0]))
        self._parts[-1][1][kind] += count
        self._sums[kind] += count

    def count(self, kind: int) -> int:
        """Return the number of events of a kind within the window."""
        self._forget()
        return self._sums[kind]

    def clear(self) -> None:
        self._parts.clear()
        self._sums = [0, 0]

    def _forget(self) -> int:
        """Drop the parts that are too old, and return the number of the present one."""
        number = int(self._clock() / self._part_s)
        while self._parts and self._parts[0][0] <= number - PARTS:
            for kind, count in enumerate(self._parts.popleft()[1]):
                self._sums[kind] -= count
        return number

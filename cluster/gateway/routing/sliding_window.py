"""Counts of the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

PARTS = 10  # of a window: what is forgotten at once


class SlidingWindow:
    """How often two kinds of things happened within `seconds`. Memory does not depend on how many they were."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._part_s = seconds / PARTS
        self._clock = clock
        self._parts: deque[tuple[int, list[int]]] = deque()  # with their number since the clock's zero
        self._sums = [0, 0]

    def add(self, kind: int, count: int = 1) -> None:
        """`kind` is 0 or 1."""
        number = self._forget()
        if not self._parts or self._parts[-1][0] != number:
            self._parts.append((number, [0, 0]))
        self._parts[-1][1][kind] += count
        self._sums[kind] += count

    def count(self, kind: int) -> int:
        self._forget()
        return self._sums[kind]

    def clear(self) -> None:
        self._parts.clear()
        self._sums = [0, 0]

    def _forget(self) -> int:
        number = int(self._clock() / self._part_s)
        while self._parts and self._parts[0][0] <= number - PARTS:
            for kind, count in enumerate(self._parts.popleft()[1]):
                self._sums[kind] -= count
        return number

"""Virtual time for the fakes: a clock that moves only when a test moves it, and runs what is scheduled on its way."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A clock that is called for seconds, as `lease_now` is. Moving it runs the scheduled actions in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._numbers), action))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self._agenda and self._agenda[0][0] <= end:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.now = end

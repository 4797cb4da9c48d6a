"""Client deadlines: when a request is of no use any more."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable

from .request import Request

SPARE_ENTRIES = 1024  # of requests that are over, before the heap is built anew


class Deadlines:
    """A heap by deadline. Requests that ended leave it when they come up, or when they are most of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0
        self._limit = SPARE_ENTRIES

    def add(self, request: Request) -> None:
        """Starts its time, if it has one. The message tells what is left, since clocks of machines differ."""
        timeout_s = request.message.timeout_s
        if not timeout_s:
            return
        if len(self._heap) >= self._limit:
            self._heap = [entry for entry in self._heap if not entry[2].is_over]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + SPARE_ENTRIES
        self._num_added += 1
        heapq.heappush(self._heap, (self._clock() + timeout_s, self._num_added, request))

    def take_expired(self) -> list[Request]:
        """Return the requests whose time is over and that are not; each once."""
        heap = self._heap
        if not heap or heap[0][0] > (now := self._clock()):
            return []
        expired = []
        while heap and heap[0][0] <= now:
            request = heapq.heappop(heap)[2]
            if not request.is_over:
                expired.append(request)
        return expired

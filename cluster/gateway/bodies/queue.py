"""Which large body is read next: the smallest that waits, so that nobody waits for all that one client has sent.

Bodies above `HEAVY_BYTES` leave one process to the others, where there are several.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools

HEAVY_BYTES = 1 << 20


class ReadingQueue:
    """Gives out processes by number. The first is the last that a heavy body gets."""

    def __init__(self, num_processes: int) -> None:
        self._idle = list(range(num_processes))
        self._heavy_left = max(1, num_processes - 1)
        self._waiting: list[tuple[int, int, asyncio.Future[int]]] = []
        self._count = itertools.count()

    @property
    def num_waiting(self) -> int:
        return sum(not given.done() for _, _, given in self._waiting)

    async def take(self, size: int) -> int:
        """Wait for a process for a body of so many bytes, and return its number."""
        given: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._count), given))
        self._give()
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():  # both at once
                self.put_back(given.result(), size)
            raise

    def put_back(self, number: int, size: int) -> None:
        """The process has read a body of so many bytes."""
        self._idle.append(number)
        self._heavy_left += size > HEAVY_BYTES
        self._give()

    def _give(self) -> None:
        """Give idle processes to those that wait. Bodies are sorted by size: behind a heavy one there are only such."""
        while self._idle and self._waiting:
            size, _, given = self._waiting[0]
            is_heavy = size > HEAVY_BYTES
            if given.done():  # its client has left
                heapq.heappop(self._waiting)
            elif is_heavy and not self._heavy_left:
                return
            else:
                heapq.heappop(self._waiting)
                number = max(self._idle) if is_heavy else min(self._idle)
                self._idle.remove(number)
                self._heavy_left -= is_heavy
                given.set_result(number)

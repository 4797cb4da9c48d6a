"""Who is served next: by priority, then by arrival."""

from __future__ import annotations

import heapq

from .request import Request
from .unread import UnreadPrompts


class WaitingQueue:
    """A heap by `Request.rank`. Who leaves from the middle is dropped when it comes up, and never comes back."""

    def __init__(self, unread: UnreadPrompts) -> None:
        """`unread` counts what its members have to compute."""
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._members: set[Request] = set()
        self._unread = unread

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, request))
        self._members.add(request)
        self._unread.add(request)

    def peek(self) -> Request | None:
        return self._heap[0][1] if self._heap else None

    def remove(self, request: Request) -> None:
        self._members.discard(request)
        self._unread.remove(request)
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)

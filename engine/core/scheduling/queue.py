"""Who is served next: by priority, then by arrival."""

from __future__ import annotations

import heapq

from ..requests.request import Request
from .unread import UnreadPrompts

SPARE_ENTRIES = 256  # of requests that are over, before the heap is built anew


class WaitingQueue:
    """A heap by `Request.rank`. Those that may not draw yet, because their grammar makes a mask, stand aside.

    push ──> aside ──its mask is there──> heap ──> removed
     └─────────────────────────────────────^

    Who leaves from the middle is over: it is dropped when it comes up, or when such entries are most of the heap.
    """

    def __init__(self, unread: UnreadPrompts) -> None:
        """`unread` counts what its members have to compute."""
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._members: set[Request] = set()
        self._unread = unread

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        self._members.add(request)
        self._unread.add(request)
        if request.may_draw:
            heapq.heappush(self._heap, (request.rank, request))

    def mask_known(self, request: Request) -> None:
        """Of one that stands aside."""
        heapq.heappush(self._heap, (request.rank, request))

    def peek(self) -> Request | None:
        """The next one; None where none is ready."""
        return self._heap[0][1] if self._heap else None

    def remove(self, request: Request) -> None:
        """One that is not there is ignored."""
        self._members.discard(request)
        self._unread.remove(request)
        if len(self._heap) > 2 * len(self._members) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)

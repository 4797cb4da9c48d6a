"""Who is served next: by priority, then by arrival."""

from __future__ import annotations

import heapq

from .request import Request


class WaitingQueue:
    """A heap by `Request.rank`. Who leaves from the middle is dropped when it comes up, and never comes back."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._members: dict[Request, int] = {}  # with the tokens that it was counted with
        self.num_tokens = 0  # that are to be computed, unless they are cached

    def __len__(self) -> int:
        return len(self._members)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.rank, request))
        num_tokens = 0 if request.awaits_transfer else request.num_tokens
        self._members[request] = num_tokens
        self.num_tokens += num_tokens

    def peek(self) -> Request | None:
        return self._heap[0][1] if self._heap else None

    def remove(self, request: Request) -> None:
        self.num_tokens -= self._members.pop(request, 0)
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)

"""The queues of requests that do not run: waiting ones, and those beside them whose KV has been loaded.

    waiting ──────────────────────┐
       │ its KV is at another     v        start
       │ engine or in a tier    admission ───────> running ──> ended        (`running_requests.py`)
       └──> loading ──> ready ────^                   │ preempted: keeps its drawn tokens, loses its computed KV
    waiting <─────────────────────────────────────────┘

WaitingQueue       by priority, then by arrival; requests whose grammar is computing a mask are kept aside
ReadyQueue         the same order, for requests that need only a row
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter, itemgetter

from ..kv.prompt_backlog import PromptBacklog
from ..requests.request import Request

TOP = 16  # entries of the heap to look at: there may be thousands, and to search all in every step would cost time
SPARE_ENTRIES = 256  # entries of requests that have left; with more of them, the heap is built anew
ASIDE = -1  # the number of no entry

QUEUE_ORDER = attrgetter("queue_key")


class WaitingQueue:
    """A heap by `Request.queue_key`. A request whose grammar is computing its mask may not draw yet, and is kept aside.

        push ──> aside ──its mask is known──> heap ──> removed
         └──────────────────────────────────────^

    The entry of a request that has left stays in the heap until it comes to the top, or until the heap is mostly such
    entries. It counts no more, also if its request is pushed again: each entry has a number, and each member one of
    them.
    """

    def __init__(self, backlog: PromptBacklog) -> None:
        self._heap: list[tuple[tuple[int, float, int], int, Request]] = []
        self._members: dict[Request, int] = {}  # with the number of their entry; ASIDE: they have none
        self._numbers = itertools.count()
        self._backlog = backlog

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in no particular order."""
        return iter(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def push(self, request: Request) -> None:
        """Add a request that is not in the queue."""
        self._members[request] = ASIDE
        self._backlog.add(request)
        if request.may_draw:
            self._add_entry(request)

    def mask_known(self, request: Request) -> None:
        """Move a request that was kept aside into the heap. One that is not aside is ignored."""
        if self._members.get(request) == ASIDE:
            self._add_entry(request)

    def peek(self) -> Request | None:
        """Return the next request; None if none may draw."""
        return self._heap[0][2] if self._heap else None

    def behind_head(self) -> list[Request]:
        """Return requests of the head's priority that come soon after it, in order: those near the top of the heap."""
        near = sorted(filter(self._counts, self._heap[1:TOP]), key=itemgetter(0))
        return [request for _, _, request in near if request.priority == self._heap[0][2].priority]

    def remove(self, request: Request) -> None:
        """Remove a request. One that is not in the queue is ignored."""
        self._members.pop(request, None)
        self._backlog.remove(request)
        if len(self._heap) > 2 * len(self._members) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)

    def _add_entry(self, request: Request) -> None:
        self._members[request] = number = next(self._numbers)
        heapq.heappush(self._heap, (request.queue_key, number, request))

    def _counts(self, entry: tuple[tuple[int, float, int], int, Request]) -> bool:
        _, number, request = entry
        return self._members.get(request) == number


class ReadyQueue:
    """Requests whose KV a transfer or a tier has brought, by `queue_key`. Those without a first token are aside.

    add ──> aside ──its token is known──> ready ──> taken
     └──────────────────────────────────────^
    """

    def __init__(self) -> None:
        self._ready: list[Request] = []  # by `queue_key`
        self._aside: set[Request] = set()

    def __len__(self) -> int:
        return len(self._ready) + len(self._aside)

    def __contains__(self, request: Request) -> bool:
        return request in self._aside or request in self._ready

    @property
    def head(self) -> Request | None:
        """The next request; None if none is ready."""
        return self._ready[0] if self._ready else None

    def add(self, request: Request) -> None:
        if request.awaits_token:
            self._aside.add(request)
        else:
            insort(self._ready, request, key=QUEUE_ORDER)

    def token_known(self, request: Request) -> None:
        """Make a request ready that was kept aside. One whose KV has not arrived yet is ignored."""
        if request in self._aside:
            self._aside.remove(request)
            insort(self._ready, request, key=QUEUE_ORDER)

    def take(self) -> Request:
        """Remove and return the head."""
        return self._ready.pop(0)

    def remove(self, request: Request) -> None:
        """Remove a request that is in the queue."""
        if request in self._aside:
            self._aside.remove(request)
        else:
            self._ready.remove(request)

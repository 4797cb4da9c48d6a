"""The requests that wait for a row: the queue, the ready queue beside it, and how much of their prompts is to compute.

WaitingQueue     by priority, then by arrival; requests whose grammar is still making a mask are kept aside
ReadyQueue       the same order, for requests whose KV has been loaded and that need only a row
PromptBacklog    tokens of waiting prompts that no cache has, for load figures
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter, itemgetter

from ..kv.blocks import BlockPool
from ..kv.request_memory import RequestMemory
from ..prefix import BlockHash
from ..requests.request import Request

TOP = 16  # entries of the heap, of thousands: looking through all of them would cost in every step
SPARE_ENTRIES = 256  # of requests that are over, before the heap is built anew

_rank = attrgetter("rank")


class PromptBacklog:
    """Counts the tokens of waiting prompts that have to be computed. A `BlockWatcher` of the pool.

        full blocks of waiting prompts      each counts once, however many requests share it, unless it is cached
        what is behind the last full one    counts always: no cache has it

    Requests and blocks that come and go change the sum as they do: it costs one look at each block of a prompt when the
    prompt comes, and one when it goes, however long it waits.
    """

    def __init__(self, memory: RequestMemory, pool: BlockPool, block_size: int) -> None:
        self._memory = memory
        self._pool = pool
        self._block_size = block_size
        self._waiting: dict[Request, tuple[int, int]] = {}  # full blocks of the request, and the tokens behind them
        self._wanted: dict[BlockHash, int] = {}  # block -> how many waiting requests share it
        self._num_missing = 0  # wanted blocks that are not cached
        self._num_behind = 0  # tokens
        pool.watch(self)

    @property
    def num_tokens(self) -> int:
        return self._num_missing * self._block_size + self._num_behind

    def num_full_blocks(self, request: Request) -> int:
        """Return how many full blocks are counted of a waiting request: as many as it had when it was added."""
        return self._waiting.get(request, (0, 0))[0]

    def add(self, request: Request) -> None:
        """Count a request, unless another engine has its KV: it computes nothing."""
        if request.awaits_transfer:
            return
        hashes, wanted = self._memory.skippable_hashes(request), self._wanted
        for block_hash in hashes:
            count = wanted.get(block_hash, 0)
            if not count and not self._pool.has(block_hash):
                self._num_missing += 1
            wanted[block_hash] = count + 1
        num_behind = request.num_tokens - len(hashes) * self._block_size
        self._num_behind += num_behind
        self._waiting[request] = len(hashes), num_behind

    def remove(self, request: Request) -> None:
        """Stop counting a request. One that is not counted is ignored."""
        num_blocks, num_behind = self._waiting.pop(request, (0, 0))
        self._num_behind -= num_behind
        wanted = self._wanted
        for block_hash in request.block_hashes[:num_blocks]:
            if wanted[block_hash] > 1:
                wanted[block_hash] -= 1
                continue
            del wanted[block_hash]
            if not self._pool.has(block_hash):
                self._num_missing -= 1

    def stored(self, block_hash: BlockHash) -> None:
        if block_hash in self._wanted:
            self._num_missing -= 1

    def evicted(self, block_hash: BlockHash) -> None:
        if block_hash in self._wanted:
            self._num_missing += 1


class WaitingQueue:
    """A heap by `Request.rank`. A request that may not draw yet, because its grammar is making a mask, is kept aside.

        push ──> aside ──its mask is known──> heap ──> removed
         └──────────────────────────────────────^

    An entry whose request has left stays in the heap until it comes up, or until such entries are most of the heap.
    """

    def __init__(self, backlog: PromptBacklog) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._members: set[Request] = set()
        self._backlog = backlog

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in no particular order."""
        return iter(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def push(self, request: Request) -> None:
        self._members.add(request)
        self._backlog.add(request)
        if request.may_draw:
            heapq.heappush(self._heap, (request.rank, request))

    def mask_known(self, request: Request) -> None:
        """Let a request into the heap that was kept aside."""
        heapq.heappush(self._heap, (request.rank, request))

    def peek(self) -> Request | None:
        """Return the next request; None where none may draw."""
        return self._heap[0][1] if self._heap else None

    def behind_head(self) -> list[Request]:
        """Return requests of the head's priority that come soon after it, in order: those near the top of the heap."""
        near = sorted(self._heap[1:TOP], key=itemgetter(0))
        return [
            request for _, request in near if request in self._members and request.priority == self._heap[0][1].priority
        ]

    def remove(self, request: Request) -> None:
        """Remove a request. One that is not in the queue is ignored."""
        self._members.discard(request)
        self._backlog.remove(request)
        if len(self._heap) > 2 * len(self._members) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)


class ReadyQueue:
    """Requests whose KV a transfer or a tier has brought, by rank. One that awaits its first token is kept aside.

    add ──> aside ──its token is known──> ready ──> taken
     └──────────────────────────────────────^
    """

    def __init__(self) -> None:
        self._ready: list[Request] = []  # by rank
        self._aside: set[Request] = set()

    def __len__(self) -> int:
        return len(self._ready) + len(self._aside)

    def __contains__(self, request: Request) -> bool:
        return request in self._aside or request in self._ready

    @property
    def head(self) -> Request | None:
        """The next request; None where none is ready."""
        return self._ready[0] if self._ready else None

    def add(self, request: Request) -> None:
        if request.awaits_token:
            self._aside.add(request)
        else:
            insort(self._ready, request, key=_rank)

    def token_known(self, request: Request) -> None:
        """Make a request ready that was kept aside. One whose KV has not come yet is ignored."""
        if request in self._aside:
            self._aside.remove(request)
            insort(self._ready, request, key=_rank)

    def take(self) -> Request:
        """Remove and return the head."""
        return self._ready.pop(0)

    def remove(self, request: Request) -> None:
        """Remove a request that is in the queue."""
        if request in self._aside:
            self._aside.remove(request)
        else:
            self._ready.remove(request)

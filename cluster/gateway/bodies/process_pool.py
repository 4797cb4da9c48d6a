"""Pool of body processes: started in advance, restarted after a failure, and assigned to bodies by size.

IDLE ──order──> BUSY ──reply──> IDLE
                  └── too slow, too large, crashed: the process has ended, and a new one starts ──> IDLE
IDLE ──killed from outside──> a new one starts ──> IDLE

A process takes 1 to 2 s to start. No body waits for that while another process is idle.

The smallest waiting body is read next, so that no client waits for all large bodies of another one. Bodies above
`HEAVY_BYTES` leave one process to the others, if there are several.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from ..errors import internal, readers_full, too_expensive
from ..model import ServedModel
from .process_messages import (
    AnswerReply,
    PeerClosed,
    PreparedReply,
    ReaderSetup,
    ReadOrder,
    ReadyReply,
    RefusalReply,
    Reply,
    receive,
    send,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 10  # CPU time for one body; the largest that can be served take 1 to 2 s
MEMORY_BYTES = 1 << 30  # beyond what a process uses before its first body
MAX_WAITING = 256  # waiting bodies for each process
RETRY_S = 2.0
HEAVY_BYTES = 1 << 20


class OutcomeCounter(Protocol):
    """Counts bodies by outcome."""

    def count_body(self, outcome: str) -> None: ...


class BodyProcessPool:
    """Reads bodies in other processes. Start it on the loop that uses it; `close` kills the processes."""

    def __init__(self, module: str, model: ServedModel, num_processes: int, counters: OutcomeCounter) -> None:
        """`module` is the full name of the processes' main module."""
        self._model, self._counters = model, counters
        self._most_waiting = MAX_WAITING * num_processes
        self._processes = [_BodyProcess(module, self._setup, self._tokenizer) for _ in range(num_processes)]
        self._queue = SmallestFirstQueue(num_processes)
        self._tokenizer_file: int | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """The number of bodies that wait for a process."""
        return self._queue.num_waiting

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that exist now."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Start all processes, and return when the first one is ready.

        Raises `ProcessCannotStart`.
        """
        others = range(1, len(self._processes))
        for number in others:
            self._queue.hold_back(number)
        await self._processes[0].started()
        if self._queue.is_idle(0):  # else a body came first
            self._watch(0)
        for number in others:
            self._run(self._give_back(number, size=0))

    async def read(self, order: ReadOrder, body: int) -> tuple[AnswerReply | PreparedReply, int]:
        """Return the reply to an order, and its file, which the caller closes.

        Raises `ApiError`: the body's own; 400 if it takes too much time or memory; 503 if too many bodies wait.
        """
        if self.num_waiting >= self._most_waiting:
            raise readers_full(RETRY_S)
        size = os.fstat(body).st_size
        number = await self._queue.take(size)
        # If the client disconnects, only its own wait ends: the process finishes this body.
        exchange = self._run(self._exchange(number, order, os.dup(body), size))
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            exchange.add_done_callback(_drop)
            raise

    def close(self) -> None:
        """Kill the processes, even while they read."""
        self._closed = True
        for process in self._processes:
            process.end()
        if self._tokenizer_file is not None:
            os.close(self._tokenizer_file)
            self._tokenizer_file = None

    async def _exchange(
        self, number: int, order: ReadOrder, body: int, size: int
    ) -> tuple[AnswerReply | PreparedReply, int]:
        outcome = "broken"
        try:
            reply, file = await self._processes[number].carry_out(order, body)
            outcome = "refused" if isinstance(reply, RefusalReply) else "read"
            if isinstance(reply, RefusalReply):
                os.close(file)
                raise reply.error()
            return reply, file
        except BodyTooSlow:
            outcome = "too_slow"
            raise too_expensive(f"takes longer than {TIMEOUT_S} s of CPU time to read") from None
        except ProcessBroken as error:
            logger.error("a large body could not be read: %s", error)
            raise too_expensive(
                "crashes the process that reads it, or needs more memory than one request may have"
            ) from None
        except ProcessCannotStart as error:
            logger.error("a large body could not be read: %s", error)
            raise internal("The gateway cannot read large bodies.") from None
        finally:
            os.close(body)
            self._counters.count_body(outcome)
            if self._processes[number].has_ended:
                self._run(self._give_back(number, size))
            else:
                self._put_back(number, size)

    async def _give_back(self, number: int, size: int) -> None:
        """Start the process if it has ended, and return it to the queue. If it cannot start, its next order says so."""
        if not self._closed:
            with contextlib.suppress(ProcessCannotStart):
                await self._processes[number].started()
        self._put_back(number, size)

    def _put_back(self, number: int, size: int) -> None:
        self._watch(number)
        self._queue.put_back(number, size)

    def _watch(self, number: int) -> None:
        self._processes[number].watch(lambda: self._ended_while_idle(number))

    def _ended_while_idle(self, number: int) -> None:
        if self._queue.is_idle(number):  # else it has just got a body, whose exchange notices
            self._queue.hold_back(number)
            self._run(self._replace(number))

    async def _replace(self, number: int) -> None:
        status = await self._processes[number].end_status()
        logger.warning("a process that reads large bodies ended with status %d while idle, and is replaced", status)
        await self._give_back(number, size=0)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _setup(self) -> ReaderSetup:
        model = self._model
        return ReaderSetup(
            model.model_id,
            model.max_model_len,
            model.vocab_size,
            list(model.eos_token_ids),
            dict(model.generation_defaults),
            MEMORY_BYTES,
            TIMEOUT_S,
        )

    def _tokenizer(self) -> int:
        """Return a memory file that holds the tokenizer."""
        if self._tokenizer_file is None:
            self._tokenizer_file = os.memfd_create("tokenizer")
            with os.fdopen(os.dup(self._tokenizer_file), "wb") as file:
                file.write(self._model.tokenizer.to_bytes())
        return self._tokenizer_file


class BodyTooSlow(Exception):
    """The process ended itself because a body took too long."""


class ProcessBroken(Exception):
    """The process ended while it read a body."""


class ProcessCannotStart(Exception):
    """The process ended before it was ready."""


class _BodyProcess:
    """A body process, which is replaced after a failure."""

    def __init__(self, module: str, setup: Callable[[], ReaderSetup], tokenizer: Callable[[], int]) -> None:
        self._module, self._make_setup, self._tokenizer = module, setup, tokenizer
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    async def started(self) -> None:
        """Wait until the process is ready for orders. Raises `ProcessCannotStart`."""
        if not self.has_ended and self._starting is None:
            return
        if self._starting is None:
            self.end()
            self._starting = asyncio.create_task(self._start())
        try:
            await asyncio.shield(self._starting)
        finally:
            if self._starting is not None and self._starting.done():
                self._starting = None

    async def carry_out(self, order: ReadOrder, body: int) -> tuple[RefusalReply | AnswerReply | PreparedReply, int]:
        """Return the reply to an order, and its file. Raises `BodyTooSlow`, `ProcessBroken`, `ProcessCannotStart`."""
        await self.started()
        channel = self._channel
        assert channel is not None
        try:
            send(channel, order, body)
            reply, file = await _received(channel)
        except (PeerClosed, OSError):
            status = await self.end_status()
            if status in (-signal.SIGPROF, -signal.SIGALRM):
                raise BodyTooSlow from None
            raise ProcessBroken(f"the process that reads large bodies ended with status {status}") from None
        return reply, file

    def end(self) -> None:
        """Kill the process if it runs."""
        self._hang_up()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # In its own session, so that Ctrl-C reaches only the gateway, which handles it.
            command = [sys.executable, "-m", self._module, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "RUST_BACKTRACE": "0"},  # shortens the message when a tokenizer runs out of memory
            )
        self._channel = ours
        ours.setblocking(False)
        try:
            send(ours, self._make_setup(), self._tokenizer())
            reply, _ = await _received(ours)
        except (PeerClosed, OSError):
            status = await self.end_status()
            raise ProcessCannotStart(f"the process that reads large bodies does not start: status {status}") from None
        assert isinstance(reply, ReadyReply)

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` once if the process ends before its next order."""
        channel, loop = self._channel, asyncio.get_running_loop()
        if channel is not None:

            def ended() -> None:
                loop.remove_reader(channel)
                on_end()

            loop.add_reader(channel, ended)  # it says nothing between orders; a reply's reader takes this one's place

    async def end_status(self) -> int:
        """Close the socket, which ends a process that still runs, and return its exit status."""
        assert self._process is not None
        self._hang_up()
        return await asyncio.to_thread(self._process.wait)

    def _hang_up(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(RuntimeError):  # no loop runs here: then nothing watches the socket
                asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None


def _wake(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


async def _received(channel: socket.socket) -> tuple[Any, int]:
    """Wait for a reply. Raises `PeerClosed` if the process has ended."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(channel, _wake, readable)
    try:
        await readable
    finally:
        if channel.fileno() >= 0:  # else the process has been ended meanwhile, and the reader is gone
            loop.remove_reader(channel)
    return receive(channel, Reply)


def _drop(exchange: asyncio.Task[tuple[AnswerReply | PreparedReply, int]]) -> None:
    """Close the file of a reply that nobody waits for any more."""
    if not exchange.cancelled() and exchange.exception() is None:
        os.close(exchange.result()[1])


class SmallestFirstQueue:
    """Assigns idle processes, by number, to waiting bodies. Process 0 is the last one that gets a heavy body."""

    def __init__(self, num_processes: int) -> None:
        self._idle = list(range(num_processes))
        self._heavy_left = max(1, num_processes - 1)
        self._waiting: list[tuple[int, int, asyncio.Future[int]]] = []
        self._count = itertools.count()

    @property
    def num_waiting(self) -> int:
        return sum(not given.done() for _, _, given in self._waiting)

    async def take(self, size: int) -> int:
        """Wait for a process for a body of `size` bytes, and return its number."""
        given: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (size, next(self._count), given))
        self._give()
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():  # a process was assigned at the moment of cancellation
                self.put_back(given.result(), size)
            raise

    def is_idle(self, number: int) -> bool:
        return number in self._idle

    def hold_back(self, number: int) -> None:
        """Reserve an idle process until `put_back`."""
        self._idle.remove(number)

    def put_back(self, number: int, size: int) -> None:
        """Return a process to the idle ones after it has read a body of `size` bytes."""
        self._idle.append(number)
        self._heavy_left += size > HEAVY_BYTES
        self._give()

    def _give(self) -> None:
        """Assign idle processes. Waiting bodies are sorted by size, so behind a heavy one there are only heavy ones."""
        while self._idle and self._waiting:
            size, _, given = self._waiting[0]
            is_heavy = size > HEAVY_BYTES
            if given.done():  # its client has disconnected
                heapq.heappop(self._waiting)
            elif is_heavy and not self._heavy_left:
                return
            else:
                heapq.heappop(self._waiting)
                number = max(self._idle) if is_heavy else min(self._idle)
                self._idle.remove(number)
                self._heavy_left -= is_heavy
                given.set_result(number)

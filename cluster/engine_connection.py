"""A gateway's connection to one engine process, and the streams of the requests in it.

An engine whose process ends closes the connection within milliseconds; if its machine or link is lost, libzmq notices
missing heartbeats. Both end the streams with `EngineGone`, as does a message that cannot be decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import enable_heartbeat, is_ipv6_url
from baton.kv_transfer.protocol.stats import TransferStats

from .cached_blocks import CachedBlocks
from .contracts import ClientCounters, EngineGone, EngineRecord, QueueBound
from .wire import Abort, AskBlocks, Begin, ClientMessage, Codec, Hello, Status, Submit, WireError

logger = logging.getLogger(__name__)

RECONNECT_S = 0.2
CONNECT_MS = 1_000  # after this a new attempt starts, since the kernel's own retries become ever rarer
HANDSHAKE_MS = 5_000
NOT_SOON_MS = 3_600_000
FRAMES_AT_ONCE = 16  # messages of one engine that are handled before other tasks of the gateway run
# Events after which libzmq would wait `NOT_SOON_MS` before it retries: a connection, or an attempt at one, has failed.
ENDS = (zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED)
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


class RequestStream:
    """The outputs of one request; an `OutputStream`.

    Outputs that wait here are yielded as one, as if a single step had drawn all their tokens. So a gateway that cannot
    keep up has fewer events to write for the same tokens.

    A stream that is garbage-collected before its last output was taken aborts the request: that output may offer KV
    blocks that nobody else knows of.
    """

    def __init__(self, abandon: Callable[[], None]) -> None:
        self._abandon_request = abandon
        self._queue: asyncio.Queue[EngineOutput | EngineGone | None] = asyncio.Queue()
        self._apart: list[EngineOutput | EngineGone | None] = []  # taken from the queue, but not joined: at most one
        self._done = False  # the last output was taken, or the stream was closed

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> EngineOutput:
        if self._done:
            raise StopAsyncIteration
        item = self._apart.pop() if self._apart else await self._queue.get()
        if item is None:
            self._done = True
            raise StopAsyncIteration
        if isinstance(item, EngineGone):
            self._done = True
            raise item
        while not self._queue.empty():
            later = self._queue.get_nowait()
            if (joined := _join(item, later)) is None:
                self._apart.append(later)
                break
            item = joined
        self._done = item.finish_reason is not None
        return item

    async def aclose(self) -> None:
        self._abandon()

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        if not self._done:
            self._done = True
            self._abandon_request()

    def put(self, output: EngineOutput) -> None:
        self._queue.put_nowait(output)

    def end(self, error: EngineGone | None) -> None:
        """End the stream, with an error or, if the gateway itself ended the request, with None."""
        self._queue.put_nowait(error)


class Connection:
    """A connection to one engine process. It reconnects until closed; each loss ends the requests in flight."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        record: EngineRecord,
        key: ClusterKey,
        identity: str,
        heartbeat_timeout_s: float,
    ) -> None:
        self.record = record
        self.last_message_s = 0.0
        self.stats: EngineStats | None = None  # None: the engine has not answered yet, or the connection is lost
        self.transfers: TransferStats | None = None
        self.cached = CachedBlocks(record.num_blocks, record.num_tier_blocks)
        self.counters = ClientCounters()
        self._context, self._key, self._identity = context, key, identity
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._codec = Codec()
        # Weak references, so that a stream that nobody holds aborts its request.
        self._requests: weakref.WeakValueDictionary[tuple[str, int], RequestStream] = weakref.WeakValueDictionary()
        self._socket: zmq.asyncio.Socket | None = None
        self._refused = False
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._task = asyncio.create_task(self._run(), name=f"engine {record.engine_id}")

    @property
    def outstanding(self) -> int:
        return len(self._requests)

    def submit(self, request: EngineRequest, queue: QueueBound | None) -> RequestStream:
        name = (request.request_id, request.generation)
        stream = RequestStream(functools.partial(self._abandon, *name))
        if self.stats is None or self._socket is None:
            stream.end(self._gone("is not connected"))
            return stream
        self._requests[name] = stream
        self._send(Submit(self.record.epoch, request, queue))
        return stream

    def begin(self, request_id: str, generation: int, token_id: int) -> None:
        if self.stats is not None and self._socket is not None:
            self._send(Begin(self.record.epoch, request_id, generation, token_id))

    def abort(self, request_id: str, generation: int) -> None:
        """Send the abort and end the request's stream."""
        stream = self._requests.pop((request_id, generation), None)
        if stream is not None:
            stream.end(None)
        if self.stats is not None and self._socket is not None:
            self._send(Abort(self.record.epoch, request_id, generation))

    def _abandon(self, request_id: str, generation: int) -> None:
        """Abort the request of a dropped stream, perhaps from another thread: the garbage collector may run in any."""
        if threading.get_ident() == self._thread_id:
            self.abort(request_id, generation)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the connection with it
            self._loop.call_soon_threadsafe(self.abort, request_id, generation)

    async def close(self, why: str) -> None:
        """End all requests with `EngineGone(why)`, then close the connection."""
        self._lose(why)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                why = await self._connect_once()
            except Exception:
                why = "lost its connection to this gateway"
                logger.exception("the connection to engine %s failed and is reopened", self.record.engine_id)
            self.counters.engines_lost += self.stats is not None
            self._lose(why)
            await asyncio.sleep(RECONNECT_S)

    async def _connect_once(self) -> str:
        """Connect, receive until the connection is lost, and return why. Raises `ZMQError` if no socket is left."""
        self._socket = socket = self._open()
        monitor: zmq.asyncio.Socket | None = None
        try:
            monitor = socket.get_monitor_socket(sum((*ENDS, *HANDSHAKE_FAILURES)))
            socket.connect(self.record.address)  # the monitor sees even its first failure, since libzmq does not retry
            self._send(Hello(self.record.epoch))
            lost = asyncio.create_task(self._watch_connection(monitor))
            receiving = asyncio.create_task(self._receive(socket))
            why = await self._first_of(lost, receiving)
            return (self._take_waiting(socket) or why) if receiving.cancelled() else why
        finally:
            socket.disable_monitor()
            if monitor is not None:  # else its files would be open until garbage is collected
                monitor.close(linger=0)
            socket.close(linger=0)
            self._socket = None

    @staticmethod
    async def _first_of(*tasks: asyncio.Task[str]) -> str:
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(task.result() for task in done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _open(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)
        self._key.secure_client(socket)
        socket.setsockopt_string(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        # libzmq must not reconnect by itself: messages of the next connection would seem to follow the lost ones of
        # this connection. With -1 (never), it would discard messages that had arrived.
        socket.setsockopt(zmq.RECONNECT_IVL, NOT_SOON_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, is_ipv6_url(self.record.address))
        enable_heartbeat(socket, self._heartbeat_timeout_s)
        return socket

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> str:
        """Wait until the connection is lost, and return why."""
        while True:
            event = await recv_monitor_message(monitor)
            if event["event"] in ENDS:
                return "closed the connection or missed heartbeats"
            if not self._refused:
                self._refused = True
                logger.error(
                    "engine %s at %s refused the handshake: it is cut off, not an engine, or has another cluster key",
                    self.record.engine_id,
                    self.record.address,
                )

    async def _receive(self, socket: zmq.asyncio.Socket) -> str:
        """Receive until a message is lost, and return why: after that, streams would miss tokens or wait for ever."""
        while True:
            incoming = asyncio.ensure_future(socket.recv())
            try:
                frame = await incoming
            except asyncio.CancelledError:  # a frame may have arrived nevertheless
                if incoming.done() and not incoming.cancelled() and (why := self._take(incoming.result())):
                    return why
                raise
            if why := self._take(frame) or self._take_waiting(socket, FRAMES_AT_ONCE - 1):
                return why
            await asyncio.sleep(0)  # while frames are waiting, recv returns without yielding to other tasks

    def _take_waiting(self, socket: zmq.asyncio.Socket, most: float = math.inf) -> str:
        """Handle at most `most` messages that have arrived. Returns like `_take`."""
        num_taken = 0
        while num_taken < most and int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
            if why := self._take(asyncio.ensure_future(socket.recv(zmq.NOBLOCK)).result()):
                return why
            num_taken += 1
        return ""

    def _take(self, frame: bytes) -> str:
        """Handle one message. Return why no further message may be handled, or an empty string."""
        self.last_message_s = time.monotonic()
        try:
            message = self._codec.decode_from_engine(frame)
        except WireError as error:
            self.counters.malformed_messages += 1
            logger.warning("a message of engine %s cannot be read: %s", self.record.engine_id, error)
            return "sent what this gateway cannot read"
        if message.epoch != self.record.epoch:
            self.counters.stale_messages += 1
            return ""
        if isinstance(message, Status):
            self._note(message)
            return ""
        for output in message.outputs:
            self._dispatch(output)
        return "could not read what this gateway sent" if message.lost_a_message else ""

    def _note(self, status: Status) -> None:
        self.stats, self.transfers = status.stats, status.transfers
        if status.blocks is not None and not self.cached.apply(status.blocks):
            self.counters.block_gaps += 1
            self._send(AskBlocks(self.record.epoch))

    def _dispatch(self, output: EngineOutput) -> None:
        name = (output.request_id, output.generation)
        stream = self._requests.get(name)
        if stream is None:
            self.counters.stale_messages += 1
            return
        stream.put(output)
        if output.finish_reason is not None:
            del self._requests[name]

    def _send(self, message: ClientMessage) -> None:
        assert self._socket is not None
        # The queue has no limit, so the message is queued when this returns.
        sent = asyncio.ensure_future(self._socket.send(self._codec.encode(message), flags=zmq.NOBLOCK))
        with contextlib.suppress(zmq.Again):  # the connection is gone, as `_watch_connection` will notice
            sent.result()

    def _lose(self, why: str) -> None:
        if self.stats is not None:
            logger.warning(
                "engine %s (rank %d, pid %d) %s",
                self.record.engine_id,
                self.record.rank,
                self.record.pid,
                why,
            )
        self.stats = None
        self.cached = CachedBlocks(self.record.num_blocks, self.record.num_tier_blocks)
        lost = list(self._requests.values())
        self._requests.clear()
        for stream in lost:
            stream.end(self._gone(why))

    def _gone(self, why: str) -> EngineGone:
        return EngineGone(f"engine {self.record.engine_id} (rank {self.record.rank}, {self.record.role}) {why}")


def _join(output: EngineOutput, later: EngineOutput | EngineGone | None) -> EngineOutput | None:
    """Return two outputs of a request as one; None where they must stay apart.

    Log probabilities, counts of drafts, offers of KV and errors belong to one step each.
    """
    if not isinstance(later, EngineOutput) or not (_has_tokens_only(output) and _has_tokens_only(later)):
        return None
    if output.finish_reason is not None or later.num_cached_tokens or later.ages:  # the latter come with the first only
        return None
    return msgspec.structs.replace(
        output,
        token_ids=output.token_ids + later.token_ids,
        finish_reason=later.finish_reason,
        stop_token_id=later.stop_token_id,
    )


def _has_tokens_only(output: EngineOutput) -> bool:
    beside = (output.logprobs, output.prompt_logprobs, output.kv_source, output.error, output.drafts)
    return bool(output.token_ids) and beside == (None,) * len(beside)

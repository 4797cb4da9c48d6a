"""A gateway's connections to all engines: one DEALER an engine, on the gateway's asyncio loop.

    directory ── snapshots ──> ZmqEngineClient ── one Connection an engine ── Hello, Submit, Abort ──> engine
                                     │                      └── Outputs ──> one queue a request
                                     └── engines(): those whose connection has answered

A dead engine is noticed twice: its kernel closes the connection within milliseconds, and the directory drops it from
the snapshot. Whichever comes first ends its requests with `EngineGone`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.kv_transfer.curve import ClusterKey
from baton.kv_transfer.handoff import TransferStats

from .cached_blocks import CachedBlocks
from .contracts import DirectorySnapshot, EngineGone, EngineRecord, EngineView, Reach
from .engines.server import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from .wire import Abort, AskBlocks, Begin, ClientMessage, Codec, Hello, Submit, WireError

logger = logging.getLogger(__name__)

RECONNECT_S = 0.2
WATCH_RETRY_S = 0.5
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


class SnapshotSource(Protocol):
    """Where news of the cluster comes from: the directory, or a list in a test."""

    async def watch(self, version: int) -> DirectorySnapshot:
        """The first snapshot newer than `version`, or the current one after a while. Raises where it is away."""
        ...


@dataclass
class ClientCounters:
    """From the start of the process."""

    malformed_messages: int = 0
    stale_messages: int = 0  # of another epoch, or about a request that is over here
    engines_lost: int = 0
    block_gaps: int = 0  # news of prefix caches were missing: snapshots were asked for


EngineKey = tuple[str, int]  # engine id and epoch: one process


class RequestStream:
    """The outputs of one request; an `OutputStream`. Dropped before its last output was taken, it aborts the request:
    that output may tell of KV blocks that wait for a reader, and nobody else knows of them.
    """

    def __init__(self, abandon: Callable[[], None]) -> None:
        self._abandon_request = abandon
        self._queue: asyncio.Queue[EngineOutput | EngineGone | None] = asyncio.Queue()
        self._done = False  # the last output was taken, or nobody wants it

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> EngineOutput:
        if self._done:
            raise StopAsyncIteration
        item = await self._queue.get()
        if item is None:
            self._done = True
            raise StopAsyncIteration
        if isinstance(item, EngineGone):
            self._done = True
            raise item
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
        """No more outputs will come; `None` where that is what the gateway wanted."""
        self._queue.put_nowait(error)


class Connection:
    """One engine process. Reconnects until closed; every loss of the connection ends the requests that ran in it."""

    def __init__(self, context: zmq.asyncio.Context, record: EngineRecord, key: ClusterKey, identity: str) -> None:
        self.record = record
        self.stats: EngineStats | None = None  # None: not answered yet, or lost
        self.transfers: TransferStats | None = None
        self.cached = CachedBlocks(record.num_blocks)
        self.counters = ClientCounters()
        self._context, self._key, self._identity = context, key, identity
        self._codec = Codec()
        # Weak, so that a stream nobody holds any more aborts its request.
        self._requests: weakref.WeakValueDictionary[tuple[str, int], RequestStream] = weakref.WeakValueDictionary()
        self._socket: zmq.asyncio.Socket | None = None
        self._refused = False
        self._task = asyncio.create_task(self._keep(), name=f"engine {record.engine_id}")

    @property
    def outstanding(self) -> int:
        return len(self._requests)

    def submit(self, request: EngineRequest) -> RequestStream:
        name = (request.request_id, request.generation)
        stream = RequestStream(functools.partial(self.abort, *name))
        if self.stats is None or self._socket is None:
            stream.end(self._gone("is not connected"))
            return stream
        self._requests[name] = stream
        self._send(Submit(self.record.epoch, request))
        return stream

    def begin(self, request_id: str, generation: int, token_id: int) -> None:
        if self.stats is not None and self._socket is not None:
            self._send(Begin(self.record.epoch, request_id, generation, token_id))

    def abort(self, request_id: str, generation: int) -> None:
        """Sends the abort and ends the streams of this request here."""
        stream = self._requests.pop((request_id, generation), None)
        if stream is not None:
            stream.end(None)
        if self.stats is not None and self._socket is not None:
            self._send(Abort(self.record.epoch, request_id, generation))

    async def close(self, why: str) -> None:
        """Ends every request with `EngineGone(why)`."""
        self._lose(why)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            self._socket = self._open()
            monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | sum(HANDSHAKE_FAILURES))
            try:
                self._send(Hello(self.record.epoch))
                lost = asyncio.create_task(self._watch_connection(monitor))
                await self._first_of(lost, asyncio.create_task(self._receive(self._socket)))
            except Exception:
                logger.exception("the connection to engine %s failed and is opened anew", self.record.engine_id)
            finally:
                self._socket.disable_monitor()
                self._socket.close(linger=0)
                self._socket = None
            self._lose("closed the connection")
            await asyncio.sleep(RECONNECT_S)

    @staticmethod
    async def _first_of(*tasks: asyncio.Task[None]) -> None:
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
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
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.connect(self.record.address)
        return socket

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        """Returns when the connection is lost."""
        while True:
            event = await recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                return
            if not self._refused:
                self._refused = True
                logger.error(
                    "engine %s at %s refused the handshake: it has another cluster key, or is no engine",
                    self.record.engine_id,
                    self.record.address,
                )

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frame = await socket.recv()
            await asyncio.sleep(0)  # where frames wait already, recv alone would never let the loop's others run
            try:
                message = self._codec.decode_from_engine(frame)
            except WireError as error:
                self.counters.malformed_messages += 1
                logger.warning("dropped a message of engine %s: %s", self.record.engine_id, error)
                continue
            if message.epoch != self.record.epoch:
                self.counters.stale_messages += 1
                continue
            self.stats, self.transfers = message.stats, message.transfers or self.transfers
            if message.blocks is not None and not self.cached.apply(message.blocks):
                self.counters.block_gaps += 1
                self._send(AskBlocks(self.record.epoch))
            for output in message.outputs:
                self._dispatch(output)

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
        # The queue has no limit, so the send is done when this returns; it cannot wait for anyone.
        self._socket.send(self._codec.encode(message), flags=zmq.NOBLOCK)

    def _lose(self, why: str) -> None:
        if self.stats is not None:
            self.counters.engines_lost += 1
            logger.warning(
                "engine %s (rank %d, pid %d) %s", self.record.engine_id, self.record.rank, self.record.pid, why
            )
        self.stats = None
        self.cached = CachedBlocks(self.record.num_blocks)
        lost = list(self._requests.values())
        self._requests.clear()
        for stream in lost:
            stream.end(self._gone(why))

    def _gone(self, why: str) -> EngineGone:
        return EngineGone(f"engine {self.record.engine_id} (rank {self.record.rank}, {self.record.role}) {why}")


class ZmqEngineClient:
    """Implements `EngineClient`. `start` it on the loop that uses it; `close` ends all connections.

    `identity` names the gateway to engines and directory alike. It connects to the engines in its `reach` only.
    """

    def __init__(self, source: SnapshotSource, key: ClusterKey, identity: str, reach: Reach | None = None) -> None:
        self._source, self._key, self._identity = source, key, identity
        self._reach = reach or Reach()
        self._context = zmq.asyncio.Context()
        self._connections: dict[EngineKey, Connection] = {}
        self._newest = DirectorySnapshot(-1, [], [])
        self._watcher: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._retired = ClientCounters()

    async def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch(), name="directory watch")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(
            *(connection.close("is left: the gateway ends") for connection in self._connections.values())
        )
        await asyncio.gather(*self._background)
        self._connections.clear()
        self._context.destroy(linger=0)

    def engines(self) -> Sequence[EngineView]:
        views = [
            EngineView(
                connection.record, connection.stats, connection.outstanding, connection.transfers, connection.cached
            )
            for connection in self._connections.values()
            if connection.stats is not None
        ]
        return sorted(views, key=lambda view: view.record.rank)

    def listed(self) -> DirectorySnapshot:
        return self._newest

    def submit(self, engine: EngineRecord, request: EngineRequest) -> RequestStream:
        connection = self._connections.get((engine.engine_id, engine.epoch))
        if connection is None:
            stream = RequestStream(lambda: None)
            stream.end(EngineGone(f"engine {engine.engine_id} (rank {engine.rank}, {engine.role}) left the cluster"))
            return stream
        return connection.submit(request)

    def begin(self, engine: EngineRecord, request_id: str, generation: int, token_id: int) -> None:
        connection = self._connections.get((engine.engine_id, engine.epoch))
        if connection is not None:
            connection.begin(request_id, generation, token_id)

    def abort(self, engine: EngineRecord, request_id: str, generation: int = 0) -> None:
        connection = self._connections.get((engine.engine_id, engine.epoch))
        if connection is not None:
            connection.abort(request_id, generation)

    def counters(self) -> ClientCounters:
        """Sums over all connections since the start."""
        total = ClientCounters(**vars(self._retired))
        for connection in self._connections.values():
            _add_counters(total, connection.counters)
        return total

    async def _watch(self) -> None:
        while True:
            try:
                snapshot = await self._source.watch(self._newest.version)
            except Exception as error:
                # The directory is being restarted: those connected keep serving meanwhile.
                logger.warning("the directory does not answer, asking again: %s", error)
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            self.apply(snapshot)

    def apply(self, snapshot: DirectorySnapshot) -> None:
        """Opens connections to engines that came into reach and closes those to engines that left."""
        if snapshot.version <= self._newest.version:
            return
        self._newest = snapshot
        reached = filter(self._reach.includes, snapshot.engines)
        alive = {(record.engine_id, record.epoch): record for record in reached}
        for name in [name for name in self._connections if name not in alive]:
            connection = self._connections.pop(name)
            self._run(self._retire(connection))
        for name, record in alive.items():
            if name in self._connections:
                self._connections[name].record = record  # the same process, which may have begun to drain
            else:
                self._connections[name] = Connection(self._context, record, self._key, self._identity)

    async def _retire(self, connection: Connection) -> None:
        await connection.close("left the cluster")
        _add_counters(self._retired, connection.counters)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _add_counters(total: ClientCounters, more: ClientCounters) -> None:
    for name, value in vars(more).items():
        setattr(total, name, getattr(total, name) + value)

"""A gateway's connections to all engines: one ZMQ DEALER for each engine, on the gateway's asyncio loop.

    directory ── snapshots ──> ZmqEngineClient ── one Connection an engine ── Hello, Submit, Abort ──> engine
                                     │                      ├── Outputs ──> one queue a request
                                     │                      └── Status ──> the newest status of each engine
                                     └── engines(): all engines whose connection has answered

A dead engine is noticed in two ways: its connection breaks or misses heartbeats, or the directory drops it from the
snapshot. Whichever comes first ends its requests with `EngineGone`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import msgspec
import zmq.asyncio

from baton.engine.core.messages import EngineRequest
from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import HEARTBEAT_TIMEOUT_S, MAX_SOCKETS
from baton.kv_transfer.protocol.messages import EngineKey

from .contracts import ClientCounters, DirectorySnapshot, EngineGone, EngineRecord, EngineView, QueueBound, Reach
from .engine_connection import Connection, RequestStream

logger = logging.getLogger(__name__)

WATCH_RETRY_S = 0.5
MAX_REMEMBERED = 1_000  # engines that have left, for which `last_message_s` is kept


class SnapshotSource(Protocol):
    """A source of cluster snapshots: the directory, or a list in a test."""

    async def watch(self, version: int) -> DirectorySnapshot:
        """Return the first snapshot of another version, or the current one after a while. Raises if there is none."""
        ...


class ZmqEngineClient:
    """Implements `EngineClient`. `start` it on the loop that uses it; `close` ends all connections.

    `identity` names the gateway to engines and directory. It connects only to engines in its `reach`, and takes an
    engine for lost if nothing has arrived from it for `heartbeat_timeout_s`.
    """

    def __init__(
        self,
        source: SnapshotSource,
        key: ClusterKey,
        identity: str,
        reach: Reach | None = None,
        *,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        queue: QueueBound | None = None,
    ) -> None:
        """`queue`: an engine whose queue is longer refuses new prompts. The attribute may be changed later."""
        self.queue = queue
        self._source, self._key, self._identity, self._heartbeat_timeout_s = source, key, identity, heartbeat_timeout_s
        self._reach = reach or Reach()
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = MAX_SOCKETS
        self._connections: dict[EngineKey, Connection] = {}
        self._newest = DirectorySnapshot(-1, [], [])
        self._watcher: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._retired = ClientCounters()
        self._last_message_s: dict[EngineKey, float] = {}  # of engines that have left, oldest first

    async def start(self) -> None:
        self._watcher = asyncio.create_task(self._watch(), name="directory watch")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(
            *(connection.close("is left: the gateway is shutting down") for connection in self._connections.values())
        )
        await asyncio.gather(*self._background)
        self._connections.clear()
        self._context.destroy(linger=0)

    def engines(self) -> Sequence[EngineView]:
        views = [
            EngineView(
                connection.record,
                connection.stats,
                connection.outstanding,
                connection.transfers,
                connection.cached,
            )
            for connection in self._connections.values()
            if connection.stats is not None
        ]
        return sorted(views, key=lambda view: view.record.rank)

    def listed(self) -> DirectorySnapshot:
        return self._newest

    def last_message_s(self, engine: EngineRecord) -> float:
        connection = self._connections.get(engine.key)
        return self._last_message_s.get(engine.key, 0.0) if connection is None else connection.last_message_s

    def submit(self, engine: EngineRecord, request: EngineRequest) -> RequestStream:
        connection = self._connections.get(engine.key)
        if connection is None:
            stream = RequestStream(lambda: None)
            stream.end(EngineGone(f"engine {engine.engine_id} (rank {engine.rank}, {engine.role}) left the cluster"))
            return stream
        return connection.submit(request, self.queue)

    def begin(self, engine: EngineRecord, request_id: str, generation: int, token_id: int) -> None:
        connection = self._connections.get(engine.key)
        if connection is not None:
            connection.begin(request_id, generation, token_id)

    def abort(self, engine: EngineRecord, request_id: str, generation: int = 0) -> None:
        connection = self._connections.get(engine.key)
        if connection is not None:
            connection.abort(request_id, generation)

    def counters(self) -> ClientCounters:
        total = copy.copy(self._retired)
        for connection in self._connections.values():
            _add_counters(total, connection.counters)
        return total

    async def _watch(self) -> None:
        while True:
            try:
                snapshot = await self._source.watch(self._newest.version)
            except Exception as error:
                # The directory is being restarted; connected engines keep serving meanwhile.
                logger.warning("the directory does not answer, asking again: %s", error)
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            self.apply(snapshot)

    def apply(self, snapshot: DirectorySnapshot) -> None:
        """Connect to engines that the gateway reaches and that are new, and disconnect from engines that have left."""
        if snapshot.version == self._newest.version:
            return
        self._newest = snapshot
        reached = filter(self._reach.includes, snapshot.engines)
        alive = {record.key: record for record in reached}
        for name in [name for name in self._connections if name not in alive]:
            connection = self._connections.pop(name)
            self._remember(name, connection.last_message_s)
            _add_counters(self._retired, connection.counters)
            self._run(connection.close("left the cluster"))
        for name, record in alive.items():
            if name in self._connections:
                self._connections[name].record = record  # the same process, but it may drain now
            else:
                self._connections[name] = self._connect(record)

    def _connect(self, record: EngineRecord) -> Connection:
        return Connection(self._context, record, self._key, self._identity, self._heartbeat_timeout_s)

    def _remember(self, name: EngineKey, last_message_s: float) -> None:
        self._last_message_s[name] = last_message_s
        if len(self._last_message_s) > MAX_REMEMBERED:
            del self._last_message_s[next(iter(self._last_message_s))]

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _add_counters(total: ClientCounters, more: ClientCounters) -> None:
    for name, value in msgspec.structs.asdict(more).items():
        setattr(total, name, getattr(total, name) + value)

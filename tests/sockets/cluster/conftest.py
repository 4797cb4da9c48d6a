"""An engine's server, and a gateway's client of it, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import zmq

from baton.cluster.contracts import EngineRecord
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.server import EngineServer

from ...helpers.fakes import CountingEngine, ListedSource, serve_engine
from .wire_fixtures import KEY, until


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def served(engine: CountingEngine) -> Iterator[tuple[EngineServer, EngineRecord]]:
    server, record = serve_engine(engine, KEY)
    yield server, record
    server.close()


@pytest.fixture
async def source(served: tuple[EngineServer, EngineRecord]) -> ListedSource:
    source = ListedSource()
    source.show(served[1])
    return source


@pytest.fixture
async def client(source: ListedSource) -> AsyncIterator[ZmqEngineClient]:
    client = ZmqEngineClient(source, KEY, "gateway-a")
    await client.start()
    await until(lambda: len(client.engines()) == 1)
    yield client
    await client.close()


@pytest.fixture
def stranger(served: tuple[EngineServer, EngineRecord]) -> Iterator[zmq.Socket]:
    """Open a socket that has the cluster key but may send any bytes."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"stranger")
    KEY.secure_client(socket)
    socket.connect(served[1].address)
    yield socket
    socket.close(linger=0)

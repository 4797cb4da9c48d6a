"""The engine's state as gateways and replicas see it, whatever happens within one turn of its step loop. No Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from baton.cluster.contracts import EngineGone, EngineRecord
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engine_connection import RequestStream
from baton.cluster.engines import engine_socket
from baton.cluster.engines.server import EngineServer
from baton.cluster.wire import Codec, EngineMessage, Status
from baton.engine.core.messages import EngineOutput, EngineStats, ErrorKind
from baton.engine.net.curve import ClusterKey

from ...helpers.fakes import CountingEngine, ListedSource, make_request, serve_engine
from ...helpers.free_ports import free_port
from ...helpers.silent_proxy import SilentProxy

pytestmark = pytest.mark.timeout(60)

KEY = ClusterKey.generate()
PATIENCE_S = 20.0  # for a machine that is busy otherwise


class HeldEngine(CountingEngine):
    """An engine whose step loop blocks when it next reads its statistics, once `stop_at_stats` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.stop_at_stats = False
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def stats(self) -> EngineStats:
        if self.stop_at_stats and threading.current_thread().name == "baton-step":
            self.stop_at_stats = False
            self.stopped.set()
            self.go_on.wait(PATIENCE_S)
        return super().stats()


class FetchingEngine(CountingEngine):
    """An engine with a request that waits for its blocks from its first step on, until `arrived` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.waits = threading.Event(), threading.Event()
        self._asked = False

    def step(self) -> list[EngineOutput]:
        if self.running and not self.arrived.is_set():
            self._asked = True
            return []
        return super().step()

    def has_work(self) -> bool:
        """Return whether there is work; a caller that hears of none sees `waits` set."""
        if self._asked and not self.arrived.is_set():
            self.waits.set()
            return False
        return super().has_work()


class YieldingEngine(HeldEngine):
    """An engine whose steps launch nothing while it yields, for a minute unless `yields` is cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.yields = threading.Event()

    def wait_s(self) -> float:
        return 60.0 if self.yields.is_set() else 0.0

    def step(self) -> list[EngineOutput]:
        if self.yields.is_set():
            self.steps += 1
            return []
        return super().step()


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine()


@pytest.fixture
def served(engine: HeldEngine) -> Iterator[tuple[EngineServer, EngineRecord]]:
    server, record = serve_engine(engine, KEY)
    yield server, record
    engine.hang.set()
    engine.go_on.set()
    server.close()


@pytest.fixture
async def connect(served: tuple[EngineServer, EngineRecord]) -> AsyncIterator[Callable[..., ZmqEngineClient]]:
    clients = []

    async def connected(identity: str, record: EngineRecord = served[1]) -> ZmqEngineClient:
        source = ListedSource()
        source.show(record)
        client = ZmqEngineClient(source, KEY, identity)
        clients.append(client)
        await client.start()
        return client

    yield connected
    for client in clients:
        await client.close()


@pytest.fixture
async def client(connect: Callable[..., ZmqEngineClient]) -> ZmqEngineClient:
    """Return a client that has heard from the engine."""
    client = await connect("gateway-a")
    await until(lambda: num_running(client) == 0)
    return client


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def tokens_until_gone(stream: RequestStream) -> tuple[list[int], bool]:
    """Return the tokens, and whether the stream ended because the engine was gone."""
    tokens: list[int] = []
    try:
        async for output in stream:
            tokens += output.token_ids
    except EngineGone:
        return tokens, True
    return tokens, False


def num_running(client: ZmqEngineClient) -> int | None:
    """Return the number of running requests that the gateway knows."""
    views = client.engines()
    return views[0].stats.num_requests_running if views and views[0].stats else None


async def test_a_gateway_that_only_the_directory_lost_goes_on_hearing_of_the_engine(
    connect: Callable[..., ZmqEngineClient], engine: HeldEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    """If its last status said that the queue is full, it would refuse clients, send nothing, and never learn better."""
    server, record = served
    lost, other = await connect("gateway-a"), await connect("gateway-b")
    await until(lambda: num_running(lost) == num_running(other) == 0)
    engine.hold.clear()
    stream = other.submit(record, make_request("b"))
    await until(lambda: num_running(lost) == 1)
    server.keep_gateways(["gateway-a", "gateway-b"])
    server.keep_gateways(["gateway-b"])
    await stream.aclose()
    await until(lambda: num_running(lost) == 0)


async def test_a_request_that_came_and_left_in_one_turn_is_not_there_for_ever(
    client: ZmqEngineClient,
    connect: Callable[..., ZmqEngineClient],
    engine: HeldEngine,
    served: tuple[EngineServer, EngineRecord],
) -> None:
    """A gateway that said hello between the two must hear of the end, though other gateways know the state already."""
    server, record = served
    engine.hold.clear()
    engine.hang.clear()
    server.wake()
    steps = engine.steps
    await until(lambda: engine.steps > steps)  # here the loop blocks
    stream = client.submit(record, make_request("a"))
    await until(lambda: server.socket.num_received == 1)
    late = await connect("gateway-b")
    await until(lambda: server.socket.num_received == 2)
    await stream.aclose()
    await until(lambda: server.socket.num_received == 3)
    engine.hang.set()
    await until(lambda: num_running(late) is not None)
    await until(lambda: num_running(late) == 0)


async def test_a_request_counts_while_it_goes_from_the_socket_into_the_engine(
    client: ZmqEngineClient, engine: HeldEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    """A drain that saw no request here would end the process."""
    server, record = served
    engine.hold.clear()
    engine.stop_at_stats = True
    stream = client.submit(record, make_request("a"))
    await until(engine.stopped.is_set)
    assert server.pulse().num_requests >= 1
    engine.go_on.set()
    await stream.aclose()


async def test_a_stream_whose_last_holder_is_another_thread_is_aborted(
    client: ZmqEngineClient, engine: HeldEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    """The garbage collector runs in any thread, for example in the one that tokenizes."""
    engine.hold.clear()
    holders = [client.submit(served[1], make_request("a"))]
    await until(lambda: "a" in engine.running)
    await asyncio.to_thread(holders.clear)
    await until(lambda: engine.aborted == ["a"])


async def test_a_connection_for_which_no_socket_is_left_is_made_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch, connect: Callable[..., ZmqEngineClient]
) -> None:
    opened, attempts = zmq.asyncio.Context.socket, []

    def open_late(context: zmq.asyncio.Context, kind: int, **options: Any) -> zmq.asyncio.Socket:
        if kind == zmq.DEALER:
            attempts.append(context)
            if len(attempts) < 3:
                raise zmq.ZMQError(zmq.EMFILE)
        return opened(context, kind, **options)

    monkeypatch.setattr(zmq.asyncio.Context, "socket", open_late)
    client = await connect("gateway-a")
    await until(lambda: num_running(client) == 0)
    assert len(attempts) == 3


async def test_the_last_words_of_an_engine_are_heard_however_late_the_gateway_looks(
    client: ZmqEngineClient, engine: HeldEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    """They say that the requests were handed back in order; a lost connection would mean that the engine has failed."""
    server, record = served
    engine.hold.clear()
    streams = [client.submit(record, make_request(str(number))) for number in range(50)]
    await until(lambda: len(engine.running) == 50)
    server.return_requests()
    deadline = time.monotonic() + PATIENCE_S
    while engine.running:  # blocks this event loop
        assert time.monotonic() < deadline
        time.sleep(0.005)
    server.close()
    time.sleep(0.5)  # the end of the connection arrives
    words = [await anext(stream) for stream in streams]
    assert [word.error.kind for word in words if word.error] == [ErrorKind.LEAVING] * 50


async def test_a_connection_that_breaks_is_not_made_anew_behind_the_gateways_back(
    connect: Callable[..., ZmqEngineClient], engine: HeldEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    """Messages sent meanwhile are lost, and later ones would be taken for their successors."""
    with SilentProxy(served[1].address) as proxy:
        record = msgspec.structs.replace(served[1], address=proxy.address)
        client = await connect("gateway-a", record)
        await until(lambda: num_running(client) == 0)
        stream = client.submit(record, make_request("a", max_tokens=1_000_000))
        first = (await anext(stream)).token_ids
        proxy.cut()  # with all data on its way
        time.sleep(1.0)  # blocks this loop for longer than a socket takes to reconnect
        tokens, gone = await tokens_until_gone(stream)
        assert gone
        assert first + tokens == list(range(1, len(first + tokens) + 1))
        await until(lambda: engine.aborted == ["a"])


async def test_a_connection_that_is_refused_is_tried_again(
    connect: Callable[..., ZmqEngineClient], served: tuple[EngineServer, EngineRecord]
) -> None:
    port = free_port()
    record = msgspec.structs.replace(served[1], address=f"tcp://127.0.0.1:{port}")
    client = await connect("gateway-a", record)
    await asyncio.sleep(0.5)
    assert num_running(client) is None
    with SilentProxy(served[1].address, port):
        await until(lambda: num_running(client) == 0)


async def test_an_engine_that_waits_for_a_requests_blocks_says_nothing_until_they_have_come(
    connect: Callable[..., ZmqEngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishing its status would delay the request for the blocks."""
    monkeypatch.setattr(engine_socket, "IDLE_POLL_S", PATIENCE_S)  # after so long it may publish
    engine = FetchingEngine()
    server, record = serve_engine(engine, KEY)
    try:
        client = await connect("gateway-a", record)
        await until(lambda: num_running(client) == 0)
        heard: list[int | str] = []  # the number of running requests, from each status; and outputs
        decode = Codec.decode_from_engine

        def decode_and_note(codec: Codec, frame: bytes) -> EngineMessage:
            message = decode(codec, frame)
            heard.append(message.stats.num_requests_running if isinstance(message, Status) else "output")
            return message

        monkeypatch.setattr(Codec, "decode_from_engine", decode_and_note)
        stream = client.submit(record, make_request("a", max_tokens=2))
        await until(engine.waits.is_set)
        engine.arrived.set()
        server.wake()
        assert await tokens_until_gone(stream) == ([1, 2], False)
        before = heard[: heard.index("output")]
        assert before == [0] * len(before), "nothing, or what was said to its hello"
        await until(lambda: num_running(client) == 0)
    finally:
        server.close()


def test_a_function_runs_in_the_step_thread_between_two_steps_and_its_error_is_its_callers() -> None:
    server, _ = serve_engine(CountingEngine(), KEY)
    try:
        names: list[str] = []
        server.run_between_steps(lambda: names.append(threading.current_thread().name)).result(PATIENCE_S)
        assert names == ["baton-step"]

        def fail() -> None:
            raise ValueError("no recording can begin")

        with pytest.raises(ValueError, match="no recording can begin"):
            server.run_between_steps(fail).result(PATIENCE_S)
        server.run_between_steps(lambda: names.append("on")).result(PATIENCE_S)
        assert names == ["baton-step", "on"], "the engine goes on"
        assert not server.ended.done()
    finally:
        server.close()


def test_a_caller_that_waits_no_more_for_its_function_does_not_end_the_engine() -> None:
    server, _ = serve_engine(CountingEngine(), KEY)
    began, go_on = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait(PATIENCE_S)

    try:
        names: list[str] = []
        running = server.run_between_steps(work)
        assert began.wait(PATIENCE_S)
        queued = server.run_between_steps(lambda: names.append("queued"))
        running.cancel()
        assert queued.cancel()
        go_on.set()
        server.run_between_steps(lambda: names.append("on")).result(PATIENCE_S)
        assert names == ["on"], "a function that was cancelled in the queue is not run"
        assert not server.ended.done()
    finally:
        go_on.set()
        server.close()


async def test_an_engine_that_yields_rests_and_hears_messages_at_once() -> None:
    engine = YieldingEngine()
    server, record = serve_engine(engine, KEY)
    source = ListedSource()
    source.show(record)
    client = ZmqEngineClient(source, KEY, "gateway-a")
    try:
        await client.start()
        await until(lambda: num_running(client) == 0)
        engine.yields.set()
        stream = client.submit(record, make_request("a"))
        await until(lambda: "a" in engine.running)
        steps = engine.steps
        await asyncio.sleep(0.2)
        assert engine.steps <= steps + 3, "it turns without a pause"
        await stream.aclose()
        await until(lambda: engine.aborted == ["a"])
        engine.yields.clear()
        server.wake()
        assert await tokens_until_gone(client.submit(record, make_request("b"))) == ([1, 2, 3, 4, 5], False)
    finally:
        engine.yields.clear()
        engine.go_on.set()
        await client.close()
        server.close()

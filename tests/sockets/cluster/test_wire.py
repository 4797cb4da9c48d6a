"""Gateways and engines over ZMQ: client and server in one process, no Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from typing import Any

import pytest
import zmq
import zmq.asyncio

from baton.cluster import engine_connection
from baton.cluster.contracts import EngineGone, EngineRecord, LoadBalancing, Reach
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.server import EngineServer
from baton.cluster.wire import Codec, Hello, Submit
from baton.engine.core.messages import ErrorKind, FinishReason
from baton.kv_transfer.protocol.stats import TransferStats

from ...helpers.fakes import CountingEngine, ListedSource, make_request, serve_engine
from .wire_fixtures import KEY, tokens_of, until

pytestmark = pytest.mark.timeout(60)


async def test_a_request_is_answered_to_its_last_token(client: ZmqEngineClient) -> None:
    record = client.engines()[0].record
    assert await tokens_of(client.submit(record, make_request("a"))) == [1, 2, 3, 4, 5]
    assert client.engines()[0].outstanding == 0


async def test_many_streams_of_two_gateways_do_not_mix(
    client: ZmqEngineClient, source: ListedSource, served: tuple[EngineServer, EngineRecord]
) -> None:
    other = ZmqEngineClient(source, KEY, "gateway-b")
    await other.start()
    await until(lambda: len(other.engines()) == 1)
    record = served[1]
    streams = [
        c.submit(record, make_request(f"{n}-{i}", max_tokens=i + 1))
        for n, c in (("a", client), ("b", other))
        for i in range(50)
    ]
    answers = await asyncio.gather(*map(tokens_of, streams))
    assert answers == [list(range(1, i + 2)) for _ in range(2) for i in range(50)]
    await other.close()


async def test_a_gateway_that_was_held_up_gets_many_tokens_at_once(
    client: ZmqEngineClient, engine: CountingEngine
) -> None:
    """It gets no separate output for each missed step: writing those would hold it up further."""
    engine.hold.clear()
    stream = client.submit(client.engines()[0].record, make_request("a", max_tokens=100))
    await until(lambda: "a" in engine.running)
    engine.hold.set()
    deadline = time.monotonic() + 20.0
    while "a" in engine.running:  # blocks this event loop
        assert time.monotonic() < deadline, "the engine makes no tokens"
        time.sleep(0.01)
    outputs = [output async for output in stream]
    assert [token for output in outputs for token in output.token_ids] == list(range(1, 101))
    assert len(outputs) < 20


async def test_closing_a_stream_aborts_its_request_at_the_engine(
    client: ZmqEngineClient, engine: CountingEngine
) -> None:
    engine.hold.clear()
    stream = client.submit(client.engines()[0].record, make_request("a"))
    await until(lambda: "a" in engine.running)
    await stream.aclose()
    await until(lambda: engine.aborted == ["a"])
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_answer_whose_end_nobody_took_is_aborted(client: ZmqEngineClient, engine: CountingEngine) -> None:
    """A client may leave just as a prefill's last output arrives: unaborted, the offer would wait out its lease."""
    stream = client.submit(client.engines()[0].record, make_request("a", max_tokens=1))
    await until(lambda: client.engines()[0].outstanding == 0)
    await stream.aclose()
    await until(lambda: engine.aborted == ["a"])
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_stream_that_nobody_holds_any_more_is_aborted(client: ZmqEngineClient, engine: CountingEngine) -> None:
    engine.hold.clear()
    client.submit(client.engines()[0].record, make_request("a"))
    await until(lambda: engine.aborted == ["a"])


async def test_attempts_to_reach_an_engine_that_is_gone_leave_no_open_file(
    client: ZmqEngineClient, served: tuple[EngineServer, EngineRecord]
) -> None:
    """Also before garbage is collected, which may be long after: the directory may list the engine for a minute."""
    attempts: list[int] = []  # open files at each: one is a socket of its own
    opened = zmq.asyncio.Context.socket

    def open_socket(*arguments: Any, **options: Any) -> Any:
        attempts.append(len(os.listdir("/proc/self/fd")))
        return opened(*arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_connection, "RECONNECT_S", 0.02)
        patched.setattr(zmq.asyncio.Context, "socket", open_socket)
        gc.disable()
        try:
            served[0].close()
            await until(lambda: len(attempts) > 120)
        finally:
            gc.enable()
    assert min(attempts[-20:]) <= max(attempts[:20])  # libzmq's thread closes files a little later


async def test_a_newer_generation_replaces_the_older_and_survives_its_abort(
    client: ZmqEngineClient, engine: CountingEngine
) -> None:
    record = client.engines()[0].record
    engine.hold.clear()
    old = client.submit(record, make_request("a"))
    new = client.submit(record, make_request("a", generation=1))
    await until(lambda: "a" in engine.running and engine.running["a"].generation == 1)
    await old.aclose()
    client.abort(record, "a", 0)
    engine.hold.set()
    assert await tokens_of(new) == [1, 2, 3, 4, 5]


async def test_an_abort_after_the_end_still_reaches_the_engine(client: ZmqEngineClient, engine: CountingEngine) -> None:
    """A finished prefill engine holds blocks for the decode engine; the abort withdraws them."""
    record = client.engines()[0].record
    await tokens_of(client.submit(record, make_request("a")))
    client.abort(record, "a")
    await until(lambda: engine.aborted == ["a"])


async def test_an_abort_of_an_older_generation_says_so_to_the_engine(
    client: ZmqEngineClient, engine: CountingEngine
) -> None:
    """The engine may hold blocks of the older one while the newer one runs, and those of the newer one afterwards."""
    record = client.engines()[0].record
    engine.hold.clear()
    stream = client.submit(record, make_request("a", generation=2))
    await until(lambda: "a" in engine.running)
    client.abort(record, "a", 1)
    await until(lambda: engine.aborted_up_to == [("a", 1)])
    engine.hold.set()
    assert await tokens_of(stream) == [1, 2, 3, 4, 5]
    client.abort(record, "a", 1)
    await until(lambda: engine.aborted_up_to == [("a", 1), ("a", 1)])


async def test_an_engine_that_ends_fails_its_streams(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    engine.hold.clear()
    stream = client.submit(served[1], make_request("a"))
    await until(lambda: "a" in engine.running)
    served[0].close()
    with pytest.raises(EngineGone, match="rank 0"):
        await asyncio.wait_for(anext(stream), 20.0)
    assert list(client.engines()) == []


async def test_an_engine_that_left_the_directory_is_gone_even_if_its_socket_answers(
    client: ZmqEngineClient, engine: CountingEngine, source: ListedSource
) -> None:
    record = client.engines()[0].record
    engine.hold.clear()
    stream = client.submit(record, make_request("a"))
    source.show()
    with pytest.raises(EngineGone):
        await asyncio.wait_for(anext(stream), 20.0)
    with pytest.raises(EngineGone):
        await anext(client.submit(record, make_request("b")))


async def test_a_gateway_that_left_the_directory_has_its_requests_aborted(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    server = served[0]
    engine.hold.clear()
    # Gateway-a has never been listed: new gateways may say hello before the directory reports them.
    server.keep_gateways(["gateway-b"])
    stream = client.submit(served[1], make_request("a"))
    await until(lambda: "a" in engine.running)
    server.keep_gateways(["gateway-a", "gateway-b"])
    await asyncio.sleep(0.05)
    assert engine.aborted == []
    server.keep_gateways(["gateway-b"])
    await until(lambda: engine.aborted == ["a"])
    await stream.aclose()


async def test_a_gateway_that_only_the_directory_lost_hears_that_its_requests_are_given_up(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    """A gateway that was stopped for a few seconds, or cut off, would otherwise wait for tokens forever."""
    server, record = served
    server.keep_gateways(["gateway-a"])
    engine.hold.clear()
    stream = client.submit(record, make_request("a"))
    await until(lambda: "a" in engine.running)
    server.keep_gateways([])
    assert (await asyncio.wait_for(anext(stream), 20.0)).finish_reason is FinishReason.ABORT
    engine.hold.set()
    assert await tokens_of(client.submit(record, make_request("b"))) == [1, 2, 3, 4, 5]


@pytest.mark.slow
async def test_a_step_that_hangs_shows(engine: CountingEngine, served: tuple[EngineServer, EngineRecord]) -> None:
    server = served[0]
    await asyncio.sleep(0.2)
    engine.hang.clear()
    server.wake()
    await until(lambda: server.pulse().stalled_s > 1.5)
    engine.hang.set()
    await until(lambda: server.pulse().stalled_s < 0.1)


async def test_gateways_hear_how_transfers_go(source: ListedSource) -> None:
    transfers = TransferStats(offers={"finished": 3}, bytes_read=7)
    server, record = serve_engine(CountingEngine(), KEY, transfers=lambda: transfers)
    client = ZmqEngineClient(source, KEY, "gateway-c")
    await client.start()
    source.show(record)
    await until(lambda: [view.transfers for view in client.engines()] == [transfers])
    transfers = TransferStats(offers={"finished": 4}, bytes_read=9)
    await until(lambda: [view.transfers for view in client.engines()] == [transfers])
    await client.close()
    server.close()


async def test_a_gateway_whose_connection_breaks_has_its_requests_aborted(
    stranger: zmq.Socket,
    engine: CountingEngine,
    served: tuple[EngineServer, EngineRecord],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.hold.clear()
    for message in (Hello(epoch=1), Submit(1, make_request("b", max_tokens=10**9))):
        stranger.send(Codec().encode(message))
    await until(lambda: "b" in engine.running)
    stranger.close(linger=0)  # as if the process had died: no abort is sent
    engine.hold.set()
    served[0].wake()
    await until(lambda: "b" in engine.aborted)
    assert served[0].counters.undeliverable_messages >= 1
    assert "gateway stranger is gone: the connection to it broke" in caplog.text


async def test_a_gateway_that_ends_ends_the_streams_of_its_requests(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    engine.hold.clear()
    stream = client.submit(served[1], make_request("a"))
    await client.close()
    with pytest.raises(EngineGone, match="the gateway is shutting down"):
        await tokens_of(stream)


async def test_an_id_in_use_by_another_gateway_is_refused(
    client: ZmqEngineClient, engine: CountingEngine, source: ListedSource, served: tuple[EngineServer, EngineRecord]
) -> None:
    other = ZmqEngineClient(source, KEY, "gateway-b")
    await other.start()
    await until(lambda: len(other.engines()) == 1)
    engine.hold.clear()
    mine = client.submit(served[1], make_request("a"))
    await until(lambda: "a" in engine.running)
    refusal = await anext(other.submit(served[1], make_request("a", generation=7)))
    assert refusal.finish_reason is FinishReason.ERROR
    assert refusal.error is not None
    assert refusal.error.kind is ErrorKind.INVALID
    engine.hold.set()
    served[0].wake()
    assert await tokens_of(mine) == [1, 2, 3, 4, 5]
    await other.close()


async def test_a_gateway_that_says_hello_again_has_forgotten_what_it_asked_for(
    stranger: zmq.Socket, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    engine.hold.clear()
    for message in (Hello(epoch=1), Submit(1, make_request("a"))):
        stranger.send(Codec().encode(message))
    await until(lambda: "a" in engine.running)
    assert engine.aborted == []
    stranger.send(Codec().encode(Hello(epoch=1)))
    await until(lambda: engine.aborted == ["a"])


async def test_gateways_hear_of_an_engine_that_other_gateways_fill(
    client: ZmqEngineClient, source: ListedSource, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    other = ZmqEngineClient(source, KEY, "gateway-b")
    await other.start()
    await until(lambda: len(other.engines()) == 1)
    engine.hold.clear()
    stream = client.submit(served[1], make_request("a"))
    await until(lambda: other.engines()[0].stats.num_requests_running == 1)  # type: ignore[union-attr]
    await stream.aclose()
    await until(lambda: other.engines()[0].stats.num_requests_running == 0)  # type: ignore[union-attr]
    await other.close()


async def test_a_step_that_fails_ends_the_server_with_its_error(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    stream = client.submit(served[1], make_request("a", max_tokens=10**6))
    await anext(stream)
    engine.explode = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        await asyncio.wait_for(asyncio.wrap_future(served[0].ended), 20.0)


async def test_an_idle_engine_sleeps(client: ZmqEngineClient, engine: CountingEngine) -> None:
    await tokens_of(client.submit(client.engines()[0].record, make_request("a")))
    await asyncio.sleep(0.1)
    before = engine.steps
    await asyncio.sleep(0.5)
    assert engine.steps - before <= 2


async def test_a_replaced_engine_at_the_same_address_is_another_engine(
    client: ZmqEngineClient, source: ListedSource, served: tuple[EngineServer, EngineRecord]
) -> None:
    server, record = serve_engine(CountingEngine(), KEY, epoch=2)
    source.show(record)
    await until(lambda: [view.record.epoch for view in client.engines()] == [2])
    assert await tokens_of(client.submit(record, make_request("a"))) == [1, 2, 3, 4, 5]
    with pytest.raises(EngineGone):
        await anext(client.submit(served[1], make_request("b")))
    server.close()


async def test_a_gateway_connects_to_the_engines_in_its_reach_and_lists_all() -> None:
    servers, records = zip(*(serve_engine(CountingEngine(), KEY, rank=rank) for rank in range(3)), strict=True)
    source = ListedSource()
    source.show(*records)
    client = ZmqEngineClient(source, KEY, "gateway-a", Reach(mode=LoadBalancing.EXTERNAL, rank=1))
    await client.start()
    try:
        await until(lambda: len(client.engines()) > 0)
        await asyncio.sleep(0.2)
        assert [view.record.rank for view in client.engines()] == [1]
        assert [record.rank for record in client.listed().engines] == [0, 1, 2]
        with pytest.raises(EngineGone):
            await anext(client.submit(records[0], make_request("r")))
        assert len(await tokens_of(client.submit(records[1], make_request("r")))) == 5
    finally:
        await client.close()
        for server in servers:
            server.close()


async def test_the_first_token_of_a_request_follows_it(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    server, record = served
    engine.hold.clear()
    stream = client.submit(record, make_request("a", generation=2))
    client.begin(record, "a", 2, 7)
    await until(lambda: engine.begun == [("a", 2, 7)])
    client.begin(record, "a", 1, 8)  # of an attempt that was given up
    client.begin(record, "b", 0, 9)  # of an unknown request
    await until(lambda: server.counters.stale_messages == 2)
    assert engine.begun == [("a", 2, 7)]
    await stream.aclose()

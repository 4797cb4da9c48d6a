"""Gateways and engines over ZMQ: client and server of one process, no Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import zmq

from baton.cluster.contracts import DirectorySnapshot, EngineGone, EngineRecord, LoadBalancing, Reach
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.engine_socket import GatewayLost
from baton.cluster.engines.server import EngineServer
from baton.cluster.wire import Begin, Codec, Hello, Outputs, Submit
from baton.engine.core.block_log import pack_names, unpack_names
from baton.engine.core.messages import ErrorKind, FinishReason
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.protocol.stats import TransferStats

from ...helpers.fakes import CountingEngine, ListedSource, make_request, serve_engine

pytestmark = pytest.mark.timeout(60)

KEY = ClusterKey.generate()
HASHES = [bytes([index]) * 16 for index in (1, 2, 3)]


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


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def tokens_of(stream: object) -> list[int]:
    return [token async for output in stream for token in output.token_ids]  # type: ignore[attr-defined]


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
    """A client may leave just when a prefill's last word arrives: blocks that it offers would wait out their lease."""
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
    """A finished prefill holds blocks for its reader; the abort withdraws them."""
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
    server.keep_gateways(
        ["gateway-b"]
    )  # it has never been listed: new gateways say hello before the news of them arrives
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
    """A gateway that was stopped for a few seconds, or cut off, would wait for its tokens for ever."""
    server, record = served
    server.keep_gateways(["gateway-a"])
    engine.hold.clear()
    stream = client.submit(record, make_request("a"))
    await until(lambda: "a" in engine.running)
    server.keep_gateways([])
    assert (await asyncio.wait_for(anext(stream), 20.0)).finish_reason is FinishReason.ABORT
    engine.hold.set()
    assert await tokens_of(client.submit(record, make_request("b"))) == [1, 2, 3, 4, 5]


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
    stranger: zmq.Socket, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
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


async def test_a_gateway_that_ends_ends_the_streams_of_its_requests(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    engine.hold.clear()
    stream = client.submit(served[1], make_request("a"))
    await client.close()
    with pytest.raises(EngineGone, match="the gateway ends"):
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


@pytest.fixture
def stranger(served: tuple[EngineServer, EngineRecord]) -> Iterator[zmq.Socket]:
    """Open a socket that has the cluster key, and may send any bytes."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    KEY.secure_client(socket)
    socket.connect(served[1].address)
    yield socket
    socket.close(linger=0)


async def answer_to(socket: zmq.Socket) -> Outputs:
    """Return the first message that is no status, which may come at any time."""
    while True:
        await until(lambda: bool(socket.poll(0)))
        message = Codec().decode_from_engine(socket.recv())
        if isinstance(message, Outputs):
            return message


async def test_messages_of_another_epoch_are_counted_and_dropped(
    stranger: zmq.Socket, client: ZmqEngineClient, served: tuple[EngineServer, EngineRecord]
) -> None:
    server, record = served
    stranger.send(Codec().encode(Hello(epoch=999)))
    stranger.send(spoilt(Submit(999, make_request("a"))))
    await until(lambda: server.counters.stale_messages == 1 and server.counters.malformed_messages == 1)
    assert await tokens_of(client.submit(record, make_request("a"))) == [1, 2, 3, 4, 5]
    assert not stranger.poll(0), "it is not for this process to answer"


@pytest.mark.parametrize(
    "frames",
    [[b"\xc1 no message"], [b"\x81\xa4type\xa6submit"], [b"two", b"frames"], [b"\x91" * 5000]],
    ids=["noise", "nothing in it", "frames", "deep"],
)
async def test_who_sends_what_no_engine_can_read_is_told_and_nobody_else_notices(
    frames: list[bytes], stranger: zmq.Socket, client: ZmqEngineClient, served: tuple[EngineServer, EngineRecord]
) -> None:
    server, record = served
    stranger.send_multipart(frames)
    answer = await answer_to(stranger)
    assert (answer.lost_a_message, answer.outputs) == (True, [])
    assert server.counters.malformed_messages == 1
    assert await tokens_of(client.submit(record, make_request("a"))) == [1, 2, 3, 4, 5]
    assert client.counters().engines_lost == 0


def spoilt(message: Submit | Begin) -> bytes:
    """Change a message as if a gateway of another version had sent it: one field has another type."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    if isinstance(message, Submit):
        fields["request"]["prompt_token_ids"] = "text"
    else:
        fields["token_id"] = "text"
    return msgspec.msgpack.encode(fields)


async def test_a_request_that_no_engine_can_read_is_answered_at_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, client: ZmqEngineClient, served: tuple[EngineServer, EngineRecord]
) -> None:
    server, record = served
    other = client.submit(record, make_request("b", max_tokens=200))
    encode = Codec.encode
    with monkeypatch.context() as patch:
        patch.setattr(Codec, "encode", lambda self, it: spoilt(it) if isinstance(it, Submit) else encode(self, it))
        stream = client.submit(record, make_request("a", generation=3))
    last = await asyncio.wait_for(anext(stream), 20.0)
    assert (last.generation, last.finish_reason) == (3, FinishReason.ERROR)
    assert last.error is not None
    assert last.error.kind is ErrorKind.INTERNAL
    assert "$.request.prompt_token_ids" in last.error.message
    assert len(await tokens_of(other)) == 200, "nobody else notices"
    assert server.counters.malformed_messages == 1


async def test_a_request_whose_first_token_cannot_be_read_ends_in_the_engine_too(
    stranger: zmq.Socket, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    engine.hold.clear()
    stranger.send(Codec().encode(Submit(1, make_request("a", generation=2))))
    await until(lambda: "a" in engine.running)
    stranger.send(spoilt(Begin(1, "a", 2, 7)))
    (last,) = (await answer_to(stranger)).outputs
    assert (last.request_id, last.generation, last.finish_reason) == ("a", 2, FinishReason.ERROR)
    assert engine.aborted == ["a"]


async def test_what_a_stranger_says_of_somebodys_request_does_not_end_it(
    stranger: zmq.Socket, engine: CountingEngine, client: ZmqEngineClient, served: tuple[EngineServer, EngineRecord]
) -> None:
    engine.hold.clear()
    stream = client.submit(served[1], make_request("a"))
    await until(lambda: "a" in engine.running)
    stranger.send(spoilt(Begin(1, "a", 0, 7)))
    assert (await answer_to(stranger)).outputs[0].error is not None
    engine.hold.set()
    served[0].wake()
    assert await tokens_of(stream) == [1, 2, 3, 4, 5]


async def test_a_gateway_of_which_a_message_was_lost_takes_its_requests_elsewhere_and_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
    client: ZmqEngineClient,
    engine: CountingEngine,
    served: tuple[EngineServer, EngineRecord],
) -> None:
    server, record = served
    engine.hold.clear()
    stream = client.submit(record, make_request("a"))
    await until(lambda: "a" in engine.running)
    with monkeypatch.context() as patch:
        patch.setattr(Codec, "encode", lambda self, message: b"\xc1 no message")
        client.begin(record, "a", 0, 7)
    with pytest.raises(EngineGone, match="could not read what this gateway sent"):
        await asyncio.wait_for(anext(stream), 20.0)
    assert engine.aborted[0] == "a"
    engine.hold.set()
    server.wake()
    await until(lambda: len(client.engines()) == 1)
    assert await tokens_of(client.submit(record, make_request("a"))) == [1, 2, 3, 4, 5]


async def test_an_answer_that_a_gateway_cannot_read_ends_its_streams_instead_of_leaving_a_gap(
    monkeypatch: pytest.MonkeyPatch, client: ZmqEngineClient, served: tuple[EngineServer, EngineRecord]
) -> None:
    stream = client.submit(served[1], make_request("a", max_tokens=10**6))
    got = (await anext(stream)).token_ids
    decode, spoils = Codec.decode_from_engine, [b"\xc1 no message"]
    monkeypatch.setattr(Codec, "decode_from_engine", lambda self, it: decode(self, spoils.pop() if spoils else it))

    async def read_on() -> None:
        async for output in stream:
            got.extend(output.token_ids)

    with pytest.raises(EngineGone, match="sent what this gateway cannot read"):
        await asyncio.wait_for(read_on(), 5)
    assert got == list(range(1, len(got) + 1))
    assert client.counters().malformed_messages == 1
    await until(lambda: len(client.engines()) == 1)
    assert await tokens_of(client.submit(served[1], make_request("b"))) == [1, 2, 3, 4, 5]


async def test_without_the_cluster_key_nobody_is_heard(
    client: ZmqEngineClient, engine: CountingEngine, source: ListedSource
) -> None:
    stranger = ZmqEngineClient(source, ClusterKey.generate(), "gateway-x")
    await stranger.start()
    await asyncio.sleep(0.3)
    assert list(stranger.engines()) == []
    await stranger.close()


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
        await asyncio.wait_for(asyncio.wrap_future(served[0].ended), 2.0)


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


def cached_by(client: ZmqEngineClient, hashes: list[bytes]) -> int:
    """Count the blocks at the start of a prompt that the engine has, as the gateway knows."""
    views = client.engines()
    return views[0].cached.count_prefix(unpack_names(pack_names(hashes))) if views else 0


async def test_gateways_know_what_an_engine_has_cached_also_those_that_come_later(
    client: ZmqEngineClient, source: ListedSource, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    for block_hash in HASHES:
        engine.store(block_hash)
    served[0].wake()
    await until(lambda: cached_by(client, HASHES) == 3)
    engine.evict(HASHES[1])  # not told yet: the newcomer's snapshot and the other's news must agree on its number
    later = ZmqEngineClient(source, KEY, "gateway-b")
    await later.start()
    try:
        await until(lambda: cached_by(later, HASHES) == 1 and cached_by(client, HASHES) == 1)
        engine.store(HASHES[1])
        served[0].wake()
        await until(lambda: cached_by(later, HASHES) == 3 and cached_by(client, HASHES) == 3)
        assert client.counters().block_gaps == later.counters().block_gaps == 0
    finally:
        await later.close()


async def test_news_of_blocks_that_a_gateway_missed_are_asked_for(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord]
) -> None:
    server, record = served
    engine.store(HASHES[0])
    server.wake()
    await until(lambda: cached_by(client, HASHES) == 1)
    server.socket.post(GatewayLost(), b"gateway-a")  # something could not be sent: it hears nothing until it asks
    server.wake()
    await until(lambda: server.socket.is_empty)
    other = ZmqEngineClient(ListedSource(), KEY, "gateway-b")
    await other.start()
    other.apply(DirectorySnapshot(9, [record], []))
    try:
        await until(lambda: cached_by(other, HASHES) == 1)
        engine.store(HASHES[1])
        server.wake()
        await until(lambda: cached_by(other, HASHES) == 2)
        assert cached_by(client, HASHES) == 1
        assert len(await tokens_of(client.submit(record, make_request("a")))) == 5
        engine.store(HASHES[2])
        server.wake()
        await until(lambda: cached_by(client, HASHES) == 3)
        assert (client.counters().block_gaps, other.counters().block_gaps) == (1, 0)
    finally:
        await other.close()


async def test_a_lost_connection_forgets_what_was_cached(
    client: ZmqEngineClient, engine: CountingEngine, served: tuple[EngineServer, EngineRecord], source: ListedSource
) -> None:
    engine.store(HASHES[0])
    served[0].wake()
    await until(lambda: cached_by(client, HASHES) == 1)
    served[0].close()
    server, record = serve_engine(CountingEngine(), KEY, epoch=2)
    source.show(record)
    try:
        await until(lambda: [view.record.epoch for view in client.engines()] == [2])
        assert cached_by(client, HASHES) == 0
    finally:
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
    client.begin(record, "b", 0, 9)  # of nobody
    await until(lambda: server.counters.stale_messages == 2)
    assert engine.begun == [("a", 2, 7)]
    await stream.aclose()

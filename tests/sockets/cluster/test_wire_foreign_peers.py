"""Malformed messages are counted, refused or answered, and do not disturb other gateways."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq

from baton.cluster.contracts import EngineGone, EngineRecord
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.server import EngineServer
from baton.cluster.wire import Begin, Codec, Hello, Outputs, Submit
from baton.engine.core.messages import ErrorKind, FinishReason
from baton.engine.net.curve import ClusterKey

from ...helpers.fakes import CountingEngine, ListedSource, make_request
from .wire_fixtures import tokens_of, until

pytestmark = pytest.mark.timeout(60)


async def answer_to(socket: zmq.Socket) -> Outputs:
    """Return the first message that is not a status; those may come at any time."""
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
    """Change the type of one field, as a gateway of another version might."""
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
    encode = Codec.encode  # also the engine's: it may send its status meanwhile
    with monkeypatch.context() as patch:
        unreadable = b"\xc1 no message"
        patch.setattr(Codec, "encode", lambda self, it: unreadable if isinstance(it, Begin) else encode(self, it))
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
        await asyncio.wait_for(read_on(), 20)
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

"""Limits on incomplete, malformed and late requests."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl

from baton.cluster.ingress import http_protocol
from baton.cluster.ingress.http_protocol import MAX_HEAD_BYTES, GuardedHttpProtocol
from baton.cluster.ingress.http_transport import HeadWithBody

pytestmark = pytest.mark.slow

ARRIVAL_S = 1.0  # long enough for a slightly slow client, on a machine that others use as well

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def answer_length(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, wait a while where the path is "/", and answer with its length."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message["body"]), message["more_body"]
    await asyncio.sleep(ARRIVAL_S + 0.1 if scope["path"] == "/" else 0)
    body = str(length).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_in_pieces(scope: Any, receive: Any, send: Any) -> None:
    """Answer with three pieces, and yield to the event loop before each of those that the path names."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(3):
        if str(number) in scope["path"]:
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"piece %d" % number, "more_body": number < 2})


@pytest.fixture
def refusals() -> list[int]:
    """Collect the statuses of requests that were refused before the application saw them."""
    return []


@pytest.fixture
async def connect(monkeypatch: pytest.MonkeyPatch, refusals: list[int]) -> AsyncIterator[Connect]:
    """Open a connection to a server that waits `ARRIVAL_S` for a request."""
    monkeypatch.setattr(http_protocol, "ARRIVAL_S", ARRIVAL_S)
    protocol: Any = functools.partial(GuardedHttpProtocol, refused=lambda error, client: refusals.append(error.status))
    config = uvicorn.Config(answer_length, port=0, http=protocol, ws="none", lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(20):
        while not server.started:
            await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield lambda: asyncio.open_connection("127.0.0.1", port)
    server.should_exit = True
    server.force_exit = True  # a test that failed may have left connections
    await task


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Read until the server closes the connection, which it must do."""
    async with asyncio.timeout(20):
        return await reader.read()


async def test_a_request_that_comes_in_pieces_is_answered_however_large_its_body(connect: Connect) -> None:
    reader, writer = await connect()
    size = 4 * MAX_HEAD_BYTES
    for piece in (b"POST /now HTTP/1.1\r\nho", b"st: x\r\n", b"content-length: %d\r\n\r\n" % size, b"x" * size):
        writer.write(piece)
        await asyncio.sleep(0.02)
    writer.write(b"GET /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await rest_of(reader)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert str(size).encode() in answer


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sent", "counted_here"),
    [
        (b"", [408]),
        (b"\r\n", [408]),
        (b"POST / HTTP/1.1\r\nhost: x\r\n", [408]),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc", []),  # the application has it, and counts it
    ],
    ids=["nothing", "an empty line", "half a head", "half a body"],
)
async def test_a_request_that_does_not_arrive_in_time_is_given_up_and_counted(
    connect: Connect, refusals: list[int], sent: bytes, counted_here: list[int]
) -> None:
    reader, writer = await connect()
    writer.write(sent)
    assert (await rest_of(reader)).startswith(b"HTTP/1.1 408 ")
    assert refusals == counted_here


class Written(asyncio.Transport):
    """A transport that only notes what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.ended = False

    def write(self, data: Any) -> None:
        assert not self.ended
        self.pieces.append(bytes(data))

    def close(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.ended


@pytest.mark.parametrize(
    ("path", "heads_and_bodies"),
    [("/", ["head, 0", "1", "2"]), ("/0", ["head", "0", "1", "2"]), ("/12", ["head, 0", "1", "2"])],
)
async def test_a_head_is_sent_with_what_follows_at_once_and_waits_for_nothing_else(
    path: str, heads_and_bodies: list[str]
) -> None:
    transport = Written()
    answer = HeadWithBody(transport, asyncio.get_running_loop())

    async def send(message: Any) -> None:
        answer.write(b"head" if message["type"] == "http.response.start" else message["body"][-1:])

    await answer_in_pieces({"path": path}, None, send)
    assert transport.pieces == [each.replace(", ", "").encode() for each in heads_and_bodies]


async def test_a_head_without_a_body_is_sent_soon_or_before_the_end() -> None:
    for ends in (False, True):
        transport = Written()
        answer = HeadWithBody(transport, asyncio.get_running_loop())
        answer.write(b"head")
        assert not answer.is_closing()
        assert transport.pieces == []
        if ends:
            answer.close()
        else:
            await asyncio.sleep(0)
        assert (transport.pieces, transport.ended) == ([b"head"], ends)


async def test_a_short_answer_is_one_piece(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody has only a part of it from a server that is killed."""
    sent: list[bytes] = []

    class Noting(HeadWithBody):
        def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
            noted = Written()
            noted.write = lambda data: (sent.append(bytes(data)), transport.write(data))  # type: ignore[method-assign,assignment,func-returns-value]
            noted.close, noted.is_closing = transport.close, transport.is_closing  # type: ignore[method-assign]
            super().__init__(noted, loop)

    monkeypatch.setattr(http_protocol, "HeadWithBody", Noting)
    reader, writer = await connect()
    writer.write(b"GET /now HTTP/1.1\r\nhost: x\r\n\r\nGET /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert (await rest_of(reader)).count(b"HTTP/1.1 200") == 2
    assert len(sent) == 2
    assert all(piece.startswith(b"HTTP/1.1 200") and piece.endswith(b"0") for piece in sent)


async def test_trickling_does_not_buy_time(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\n")

    async def trickle() -> None:
        while not writer.is_closing():
            writer.write(b"x: y\r\n")
            await asyncio.sleep(0.05)

    task = asyncio.create_task(trickle())
    with suppress(ConnectionError):  # the server closed before it read everything
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 408 ")
    task.cancel()


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nx: ", b"GET /"], ids=["header", "url"])
async def test_a_head_that_never_ends_is_refused(connect: Connect, head: bytes) -> None:
    reader, writer = await connect()
    writer.write(head + b"a" * MAX_HEAD_BYTES)
    assert (await rest_of(reader)).startswith(b"HTTP/1.1 431 ")


CHUNKED = b"POST /now HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"


@pytest.mark.parametrize("trailers", [b"x: y\r\n" * (MAX_HEAD_BYTES // 2), b"x: " + b"y" * 3 * MAX_HEAD_BYTES])
async def test_trailers_that_never_end_are_refused(connect: Connect, trailers: bytes) -> None:
    reader, writer = await connect()
    for part in (CHUNKED, trailers[: len(trailers) // 2], trailers[len(trailers) // 2 :]):
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0.02)
    assert (await rest_of(reader)).startswith(b"HTTP/1.1 431 ")


async def test_trailers_are_dropped(monkeypatch: pytest.MonkeyPatch, connect: Connect) -> None:
    kept: list[bytes] = []
    real = httptools_impl.HttpToolsProtocol.on_header

    def note(self: Any, name: bytes, value: bytes) -> None:
        kept.append(name)
        real(self, name, value)

    monkeypatch.setattr(httptools_impl.HttpToolsProtocol, "on_header", note)
    reader, writer = await connect()
    writer.write(CHUNKED + b"authorization: me\r\n\r\nGET /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answers = await rest_of(reader)
    assert answers.count(b"HTTP/1.1 200 ") == 2
    assert kept == [b"host", b"transfer-encoding", b"host", b"connection"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("padding", ["url", "header"])
@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 431)])
async def test_a_head_may_have_so_many_bytes_and_not_one_more(
    connect: Connect, refusals: list[int], pieces: int, padding: str, extra: int, status: int
) -> None:
    reader, writer = await connect()
    start, end = {"url": (b"GET /", b" HTTP/1.1\r\nconnection: close\r\n\r\n"),
                  "header": (b"GET /now HTTP/1.1\r\nconnection: close\r\nx: ", b"\r\n\r\n")}[padding]  # fmt: skip
    head = start + b"a" * (MAX_HEAD_BYTES + extra - len(start) - len(end)) + end
    assert len(head) == MAX_HEAD_BYTES + extra
    step = -(-len(head) // pieces)
    for at in range(0, len(head), step):
        writer.write(head[at : at + step])
        await writer.drain()
        await asyncio.sleep(0.02)
    assert (await rest_of(reader)).startswith(b"HTTP/1.1 %d " % status)
    assert refusals == [431] * extra


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "garbage",
    [b"no request\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"a" * 2 * MAX_HEAD_BYTES, b"GET /"],
    ids=["garbage", "a head without end", "a head that stops"],
)
@pytest.mark.parametrize("path", [b"/now", b"/"], ids=["at once", "slow"])
async def test_requests_before_what_is_none_get_their_answers_first(
    connect: Connect, refusals: list[int], path: bytes, garbage: bytes
) -> None:
    reader, writer = await connect()
    asked = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
    writer.write(b"".join(asked % (path, size, b"x" * size) for size in (1, 2, 3)) + garbage)
    answers = re.split(rb"HTTP/1[.]1 (?=\d)", await rest_of(reader))[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"200", b"%d" % refusals[0]]
    assert [answer[-1:] for answer in answers[:3]] == [b"1", b"2", b"3"]
    assert len(refusals) == 1


async def test_a_body_that_is_late_breaks_into_no_answer_before_it(connect: Connect, refusals: list[int]) -> None:
    """The server stops reading while it answers the first request, so the second one cannot be late."""
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nPOST /now HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc")
    answers = re.split(rb"HTTP/1[.]1 (?=\d)", await rest_of(reader))[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"408"]
    assert answers[0].endswith(b"\r\n\r\n0")


async def test_the_beginning_of_the_next_request_does_not_cost_an_answer_that_is_on_its_way(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.sleep(0.02)
    writer.write(b"GET / HT")
    assert (await rest_of(reader)).startswith(b"HTTP/1.1 200 ")


async def test_a_refusal_arrives_whole_though_the_client_goes_on_sending(connect: Connect) -> None:
    """Unread bytes would make the kernel reset the connection, and the answer could be lost."""
    reader, writer = await connect()
    writer.write(b"no request\r\n\r\n")
    await asyncio.sleep(0.1)  # it is refused
    for _ in range(8):
        writer.write(b"x" * MAX_HEAD_BYTES)
        await writer.drain()
    assert (await rest_of(reader)).startswith(b"HTTP/1.1 400 ")


async def test_nobody_becomes_a_websocket(connect: Connect) -> None:
    reader, writer = await connect()
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: aaaa\r\nsec-websocket-version: 13\r\n"
    writer.write(b"GET /now HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200 ")
    writer.close()


OFFER = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
BODIES = {
    "length": b"content-length: 5\r\n\r\nhello",
    "chunks": b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_who_offers_another_protocol_is_answered_in_this_one(connect: Connect, body: bytes, piece: int) -> None:
    """Java's client offers an upgrade with each request."""
    reader, writer = await connect()
    asked = b"POST /now HTTP/1.1\r\nhost: x\r\n" + OFFER + body
    last = b"POST /now HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 3\r\n\r\nbye"
    sent = asked + asked + last
    for start in range(0, len(sent), piece):
        writer.write(sent[start : start + piece])
        await writer.drain()
    answers = await rest_of(reader)
    assert answers.count(b"HTTP/1.1 200") == 3
    assert [text[-1:] for text in answers.split(b"HTTP/1.1 ")[1:]] == [b"5", b"5", b"3"]


async def test_many_offers_at_once_cost_no_more_than_as_many_requests(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write((b"GET /now HTTP/1.1\r\n" + OFFER + b"\r\n") * 2000 + b"no request\r\n\r\n")
    answers = await rest_of(reader)
    assert answers.count(b"HTTP/1.1 200 ") == 2000
    assert answers.count(b"HTTP/1.1 400 ") == 1


async def test_of_pipelined_requests_few_are_read_while_others_wait(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    read: list[int] = []

    class Counted(httptools_impl.RequestResponseCycle):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    def count(self: GuardedHttpProtocol, data: bytes) -> None:
        read.append(len(data))
        real(self, data)

    real = GuardedHttpProtocol.data_received
    monkeypatch.setattr(GuardedHttpProtocol, "data_received", count)
    monkeypatch.setattr(httptools_impl, "RequestResponseCycle", Counted)
    reader, writer = await connect()
    request = b"POST /now HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
    writer.write(request * 200_000)
    for _ in range(50):  # one after the other
        await reader.readuntil(b"\r\n\r\n0")
    most = http_protocol.PIECE_BYTES // len(request) + 1
    assert len(made) < 50 + 3 * most
    assert sum(read) < 50 * len(request) + 2**20
    writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\n" + OFFER + b"content-length: -1\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2", "CONNECT", "two lengths", "an offer with no length"],
)
async def test_what_is_no_request_is_refused_in_the_common_shape(connect: Connect, sent: bytes) -> None:
    reader, writer = await connect()
    writer.write(sent)
    head, _, body = (await rest_of(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}

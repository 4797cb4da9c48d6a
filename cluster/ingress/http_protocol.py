"""uvicorn's HTTP protocol, with limits on what a client may send before its request is complete.

uvicorn waits for ever until a request is complete, and keeps everything that arrives before. Connections that trickle
(slowloris), headers without an end or thousands of pipelined requests would use up the gateway's memory and file
descriptors.

    connection ── no descriptor to spare ──────────────────────> 503
    head ──────── too large, malformed, late ──> 431, 400, 408 ─┐ after the answers to earlier requests
    body ──────── malformed, late, with too large trailers: same ┴─> the connection is closed

An answer's head waits for the first part of its body, as long as that comes in the same turn of the event loop. So a
short answer is sent in one piece: of a gateway that is killed, a client or a balancer has all of it or nothing.

Offers of other protocols (`Upgrade`) are ignored, as RFC 9110 (7.8) allows. Java's own client offers HTTP/2
(`Upgrade: h2c`) with each unencrypted request. httptools takes every offer for accepted: it ends the request after its
head, and leaves the body to a parser of the other protocol.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton.cluster.gateway.errors import ApiError, too_many_connections
from baton.cluster.gateway.middleware import REFUSED

from .http_transport import HeadWithBody, WatchedTransport

MAX_HEAD_BYTES = 64 * 1024  # request line and headers, including the empty line at their end
PIECE_BYTES = (
    4096  # of a head, parsed at once: they hold at most some 200 requests, and while one waits no more are parsed
)
ARRIVAL_S = 60.0  # from a request's first byte (or the connection's beginning) to its last
LAST_ARRIVAL_S = 1.0  # the same, for a request that is arriving when the server closes
LAST_READ_S = 0.5  # for which a refused connection is still read, because closing with unread bytes resets it

Refused = Callable[[ApiError, str], None]


def uncounted(error: ApiError, client: str) -> None:
    """Do nothing: the default, which counts no refusals."""


class GuardedHttpProtocol(HttpToolsProtocol):
    """Refuses a request with too large a head (431) or that does not arrive in time (408), and disconnects."""

    def __init__(
        self, *args: Any, refused: Refused = uncounted, max_descriptor: int = sys.maxsize, **kwargs: Any
    ) -> None:
        """`refused` is called with each refusal that the application does not see, and with the client's address.

        Connections whose file descriptors are above `max_descriptor` are refused: the process itself needs the rest.
        """
        super().__init__(*args, **kwargs)
        self.parser = Http1Parser(self)  # type: ignore[assignment]  # it has the methods of httptools' own that uvicorn calls
        self._refused, self._max_descriptor = refused, max_descriptor
        self._in_body = False
        self._head_bytes = 0  # of the head so far; within a body, bytes since the last one of its content
        self._unread = b""  # behind pipelined requests, until the last of them is being answered
        self._answered: RequestResponseCycle | None = None  # the oldest request; pipelined ones wait behind it
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None  # once set, nothing more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = self._watched = WatchedTransport(transport, self.loop)  # type: ignore[assignment]
        self.flow = _BoundedFlow(transport, lambda: len(self._unread) < MAX_HEAD_BYTES)
        descriptor = transport.get_extra_info("socket").fileno()
        if descriptor > self._max_descriptor:  # the kernel assigns the lowest free number
            self._refuse(too_many_connections())
            return
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_deadline()
        self._watched.unwatch()
        super().connection_lost(exc)
        if self._answered is not None:  # uvicorn tells only the newest request
            self._answered.disconnected = True
            self._answered.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watched.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._watched.is_closing():
            self._watched.unwatch()

    def data_received(self, data: bytes) -> None:
        self._set_deadline()
        rest, self._unread = memoryview(self._unread + data), b""
        while rest and self._refusal is None and not self.transport.is_closing():
            if self.pipeline:
                self._unread = bytes(rest)
                if len(rest) >= MAX_HEAD_BYTES:
                    self.flow.pause_reading()
                break
            if self._head_bytes >= MAX_HEAD_BYTES:
                self._refuse(ApiError(431, "The request line and headers, or the trailers, are too large."))
                return
            most = MAX_HEAD_BYTES if self._in_body else min(PIECE_BYTES, MAX_HEAD_BYTES - self._head_bytes)
            piece = rest[:most]
            self._head_bytes += len(piece)
            super().data_received(cast(bytes, piece))
            rest = rest[len(piece) :]
        if self._arriving:
            self._set_deadline()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # 1, not 0: if the head began in the same piece as the end of another request, its length so far is unknown.
        self._head_bytes = max(1, self._head_bytes)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # else it is a trailer of a chunked body: nobody reads these
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._offers_upgrade:  # the parser will read the head again without the offer
            return
        super().on_headers_complete()
        self._in_body, self._head_bytes = True, 0
        if not self.pipeline:
            self._answered = self.cycle
        if self.parser.get_method() != b"HEAD":  # its answers are heads only
            self.cycle.transport = HeadWithBody(self._watched, self.loop)  # type: ignore[assignment]
        if self.parser.get_http_version() < "1.1":
            _answer_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._in_body, self._head_bytes = False, 0
        self._drop_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        if not was_last:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self._unread and not self.pipeline:
            self.loop.call_soon(self._read_on)
        if was_last and self._refusal is not None:
            self._send_refusal(self._refusal)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.data_received(b"")
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, f"This is not an HTTP/1.1 request. {msg}"))

    def shutdown(self) -> None:
        """Close with the server. A request that has begun may still arrive, as may the first request of a new
        connection. Answers tell the client that the connection closes after them.
        """
        if self._answering or (self.cycle is not None and not self._arriving):
            super().shutdown()
            return
        self._drop_deadline()
        self._deadline = self.loop.call_later(LAST_ARRIVAL_S, self.transport.close)

    @property
    def _offers_upgrade(self) -> bool:
        return cast(Http1Parser, self.parser).offers_upgrade

    @property
    def _arriving(self) -> bool:
        return self._in_body or self._head_bytes > 0

    @property
    def _answering(self) -> bool:
        """Return whether a received request has no complete answer yet; while requests wait, one is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        if self._deadline is None and self._refusal is None:
            self._deadline = self.loop.call_later(ARRIVAL_S, self._too_late)

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        # A request behind others: its deadline begins when they have been answered.
        if self.pipeline or (self._answering and not self._in_body):
            self._set_deadline()
            return
        self._refuse(ApiError(408, f"The request did not arrive within {ARRIVAL_S:g} s.", type="timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer an incomplete or malformed request, after the answers to earlier requests, and close."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        self._drop_deadline()
        if not self._in_body:
            if not self._answering:
                self._send_refusal(error)
        elif self.pipeline:  # earlier requests are being answered; the application will not see this one
            self.pipeline.popleft()
        elif self.cycle.response_started:  # the client has received a part of another answer
            self.transport.close()
        else:
            cast(dict[str, Any], self.cycle.scope)[REFUSED] = error.status  # so that the application counts it
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._write(error)

    def _send_refusal(self, error: ApiError) -> None:
        if not self.transport.is_closing():
            self._refused(error, self.client[0] if self.client else "")
            self._write(error)

    def _write(self, error: ApiError) -> None:
        body = error.body()
        headers = {
            "content-type": "application/json",
            "connection": "close",
            "content-length": len(body),
            **error.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self.transport.write_eof()
        self.flow.resume_reading()
        self._deadline = self.loop.call_later(LAST_READ_S, self.transport.close)  # earlier if the client closes


class _BoundedFlow(FlowControl):
    """The flow of one connection, which uvicorn resumes after each answer, however much is unread."""

    def __init__(self, transport: asyncio.Transport, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read = may_read

    def resume_reading(self) -> None:
        if self._may_read():
            super().resume_reading()


def _answer_without_chunks(cycle: RequestResponseCycle) -> None:
    """End the body of an answer in HTTP/1.0 by closing the connection, if its length is unknown.

    HTTP/1.0 has no chunks, but uvicorn would send them, against RFC 9112 (6.1), and clients would take their lengths
    for text. Old health checks use HTTP/1.0, as do `ab` and nginx by default. Call this before the application.
    """
    send, has_length = cycle.send, False
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False  # not part of HTTP/1.0 (RFC 9110, 10.1.1)

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn expects no bytes beyond a piece
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


class Receiver(Protocol):
    """The object that gets the parser's callbacks. It ignores the end of a head or message while `offers_upgrade`."""

    url: bytes
    headers: list[tuple[bytes, bytes]]  # with lower-case names


class Http1Parser:
    """httptools' parser of requests. A head with an `Upgrade` offer is read a second time, without the offer."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = self._fresh()

    @property
    def offers_upgrade(self) -> bool:
        """Return whether the head just read offers an upgrade. CONNECT does not: it opens a tunnel."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse more bytes. Raises `httptools.HttpParserError` for bytes that are no request."""
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self.offers_upgrade:
                    raise
                rest = rest[offer.args[0] :]
                head = self._head_without_offer()
                self._parser = self._fresh()
                self._parser.feed_data(head)

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return self._parser.should_upgrade()

    def _fresh(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._receiver)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn: answer the first, then close
        return parser

    def _head_without_offer(self) -> bytes:
        first = b"%b %b HTTP/%b\r\n" % (self.get_method(), self._receiver.url, self.get_http_version().encode())
        kept = [b"%b: %b\r\n" % header for header in self._receiver.headers if header[0] != b"upgrade"]
        return b"".join([first, *kept, b"\r\n"])

"""uvicorn's HTTP protocol, with limits on what a client may send before it has sent a request.

uvicorn waits for ever for a request to be complete and keeps everything that comes until then: connections that trickle
(slowloris), or headers that never end, would take the gateway's memory and file descriptors.

    connection ── no descriptor to spare ──────────────────────> 503
    head ──────── too large, malformed, late ──> 431, 400, 408 ─┐ behind the answers to the requests before it
    body ──────── malformed, late ─────────────> 400, 408 ──────┴─> the connection is closed

Offers of other protocols (`Upgrade`) are ignored, as RFC 9110 (7.8) lets a server do. Java's own client offers HTTP/2
(`Upgrade: h2c`) with each request in the clear. httptools takes every offer for accepted: it ends the request behind
its head, and leaves the body to a parser of the other protocol.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from baton.cluster.gateway.errors import ApiError, too_many_connections
from baton.cluster.gateway.middleware import REFUSED

MAX_HEAD_BYTES = 64 * 1024  # request line and headers, up to the end of the empty line behind them
ARRIVAL_S = 60.0  # from a request's first byte (or the connection's beginning) to its last
LAST_ARRIVAL_S = 1.0  # for a request that is arriving when the server closes
LAST_READ_S = 0.5  # for which a refused connection is still read: closing one with unread bytes resets it

Refused = Callable[[ApiError, str], None]


def uncounted(error: ApiError, client: str) -> None:
    """Do nothing: the default, which counts no refusals."""


class GuardedHttpProtocol(HttpToolsProtocol):
    """Refuses a request whose head is too large (431) or that does not arrive in time (408), and closes."""

    def __init__(
        self, *args: Any, refused: Refused = uncounted, max_descriptor: int = sys.maxsize, **kwargs: Any
    ) -> None:
        """`refused` is called with each refusal that the application does not see, and the client's address.

        Connections whose file descriptors are above `max_descriptor` are refused: the rest is for the process itself.
        """
        super().__init__(*args, **kwargs)
        self.parser = Http1Parser(self)  # type: ignore[assignment]  # it has the methods of httptools' own that uvicorn calls
        self._refused, self._max_descriptor = refused, max_descriptor
        self._in_body = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None  # once there is one, nothing more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        descriptor = transport.get_extra_info("socket").fileno()
        if descriptor > self._max_descriptor:  # the kernel gives out the lowest number that is free
            self._refuse(too_many_connections())
            return
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._set_deadline()
        rest = memoryview(data)
        while rest and self._refusal is None and not self.transport.is_closing():
            piece = rest
            if not self._in_body:
                piece = rest[: MAX_HEAD_BYTES - self._head_bytes]
                self._head_bytes += len(piece)
            if not piece:
                self._refuse(ApiError(431, "The request line and headers are too large."))
                return
            super().data_received(cast(bytes, piece))
            rest = rest[len(piece) :]
        if self._arriving:
            self._set_deadline()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = max(
            1, self._head_bytes
        )  # a head that begins in the piece in which another request ended: its length so far is unknown

    def on_headers_complete(self) -> None:
        if self._offers_upgrade:  # the parser reads the head again, without the offer
            return
        super().on_headers_complete()
        self._in_body, self._head_bytes = True, 0
        if self.parser.get_http_version() < "1.1":
            _answer_without_chunks(self.cycle)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._in_body, self._head_bytes = False, 0
        self._drop_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        super().on_response_complete()
        if was_last and self._refusal is not None:
            self._send_refusal(self._refusal)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, f"This is no HTTP/1.1 request. {msg}"))

    def shutdown(self) -> None:
        """Close with the server. A request that has begun may still arrive, as may one on a connection that has brought
        nothing yet. Answers say that they are the last ones.
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
        """Tell whether a request has come whose answer is not complete: while requests wait, one is being answered."""
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
        if self.pipeline or (
            self._answering and not self._in_body
        ):  # a request behind others: its deadline counts from their answers
            self._set_deadline()
            return
        self._refuse(ApiError(408, f"The request did not arrive within {ARRIVAL_S:g} s.", type="timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer an incomplete or malformed request, after the requests before it, and close."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        self._drop_deadline()
        if not self._in_body:
            if not self._answering:
                self._send_refusal(error)
        elif self.pipeline:  # requests before it are being answered: the application never sees it
            self.pipeline.popleft()
        elif self.cycle.response_started:  # the client has another answer, or a part of it
            self.transport.close()
        else:
            cast(dict[str, Any], self.cycle.scope)[REFUSED] = error.status  # the application counts it
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
        self._deadline = self.loop.call_later(LAST_READ_S, self.transport.close)  # or when the client closes


def _answer_without_chunks(cycle: RequestResponseCycle) -> None:
    """Make an exchange whose request is in HTTP/1.0 end its body with the connection, where no length is known.

    HTTP/1.0 knows no chunks, yet uvicorn sends them, against RFC 9112 (6.1), and their lengths would be taken for text.
    Old health checks ask in HTTP/1.0, as do `ab` and nginx by default. To be called before the application is.
    """
    send, has_length = cycle.send, False
    cycle.keep_alive = False
    cycle.waiting_for_100_continue = False  # HTTP/1.0 does not know it (RFC 9110, 10.1.1)

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts down to none for each piece
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


class Receiver(Protocol):
    """The object whose callbacks the parser calls. It ignores the end of a head or message while `offers_upgrade`."""

    url: bytes
    headers: list[tuple[bytes, bytes]]  # with lower-case names


class Http1Parser:
    """httptools' parser of requests, which reads a head with an offer a second time, without it."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = self._fresh()

    @property
    def offers_upgrade(self) -> bool:
        """Tell whether the head just read offers an upgrade. CONNECT asks for none: it opens a tunnel."""
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse more bytes. Raises `httptools.HttpParserError` for what is no request."""
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
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: answer the first, then close
        return parser

    def _head_without_offer(self) -> bytes:
        first = b"%b %b HTTP/%b\r\n" % (self.get_method(), self._receiver.url, self.get_http_version().encode())
        kept = [b"%b: %b\r\n" % header for header in self._receiver.headers if header[0] != b"upgrade"]
        return b"".join([first, *kept, b"\r\n"])

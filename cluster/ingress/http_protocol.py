"""uvicorn's HTTP protocol, with limits on what a client may send before it has sent a request.

uvicorn waits for ever for a request to be complete and keeps whatever comes until then: connections that trickle
(slowloris), or headers that never end, would take the gateway's memory and file descriptors.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from baton.cluster.gateway.errors import ApiError

from .http_1_0 import answer_without_chunks
from .one_protocol import OneProtocolParser

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
ARRIVAL_S = 60.0  # from a request's first byte (or the connection's beginning) to its last
LAST_ARRIVAL_S = 1.0  # of one that is on its way when the server closes


class GuardedHttpProtocol(HttpToolsProtocol):
    """Refuses a request whose head is too large (431) or that does not arrive in time (408), and closes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = OneProtocolParser(self)  # type: ignore[assignment]  # it has what uvicorn calls of httptools' own
        self._in_body = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(ARRIVAL_S, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(ARRIVAL_S, self._too_late)
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "The request line and headers are too large.")

    def on_headers_complete(self) -> None:
        if self._offers_upgrade:  # it comes again, without the offer
            return
        self._in_body, self._head_bytes = True, 0
        super().on_headers_complete()
        if self.parser.get_http_version() < "1.1":
            answer_without_chunks(self.cycle)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._in_body, self._head_bytes = False, 0
        self._drop_deadline()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"This is no HTTP/1.1 request. {msg}")

    def shutdown(self) -> None:
        """The server closes. What is on its way may still arrive: on a connection that has brought nothing yet, and a
        request that has begun. Answers say that they are the last ones.
        """
        if self._answering or (self.cycle is not None and not self._arriving):
            super().shutdown()
            return
        self._drop_deadline()
        self._deadline = self.loop.call_later(LAST_ARRIVAL_S, self.transport.close)

    @property
    def _offers_upgrade(self) -> bool:
        return cast(OneProtocolParser, self.parser).offers_upgrade

    @property
    def _arriving(self) -> bool:
        return self._in_body or self._head_bytes > 0

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self) -> None:
        self._deadline = None
        if self._answering and not self._in_body:  # a head that came too early: its turn comes after the answer
            self._deadline = self.loop.call_later(ARRIVAL_S, self._too_late)
            return
        self._refuse(408, f"The request did not arrive within {ARRIVAL_S:g} s.")

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if not (self._answering and self.cycle.response_started):
            body = ApiError(status, message).body()
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

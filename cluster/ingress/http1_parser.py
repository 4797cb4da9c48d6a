"""A parser for HTTP/1.1 that ignores offers of other protocols (`Upgrade`), as RFC 9110 (7.8) lets a server do.

Java's own client offers HTTP/2 (`Upgrade: h2c`) with each request in the clear. httptools takes every offer for
accepted: it ends the request behind its head, and leaves the body to a parser of the other protocol.
"""

from __future__ import annotations

from typing import Protocol

import httptools


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

"""Messages of hand-offs on their way over a channel. What cannot be read or sent is dropped, and counted.

    us as a reader    Hello, Claim, Finish ... ──connection that we opened──> holder
    us as a holder    Welcome, Granted ...     ──connection on which the reader asked──> reader

One thread uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from ..errors import MalformedMessage
from ..net.channel import Channel, Route
from ..protocol.messages import EngineKey, Message, decode, encode

logger = logging.getLogger(__name__)

MAX_READER_ROUTES = 4096


class Mail:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._readers: dict[EngineKey, Route] = {}  # who asked last comes last
        self.malformed = 0
        self.unsent = 0

    def receive(self) -> Iterator[tuple[Route, Message]]:
        """All that has come by now. It is decoded as the caller goes on."""
        return self._decoded(self._channel.receive())

    def remember(self, reader: EngineKey, route: Route) -> None:
        """Answers go back to it this way. Who has been silent for longest is forgotten."""
        self._readers.pop(reader, None)
        self._readers[reader] = route
        if len(self._readers) > MAX_READER_ROUTES:
            del self._readers[next(iter(self._readers))]

    def to_reader(self, reader: EngineKey, message: Message) -> None:
        self.send(self._readers.get(reader), message)

    def send(self, route: Route | None, message: Message) -> None:
        """None: there is no way to whom it is for."""
        if route is None or not self._channel.send(route, encode(message)):
            self.unsent += 1

    def _decoded(self, arrived: Iterable[tuple[Route, bytes]]) -> Iterator[tuple[Route, Message]]:
        for route, data in arrived:
            try:
                message = decode(data)
            except MalformedMessage as error:
                self.malformed += 1
                logger.warning("dropped: %s", error)
                continue
            yield route, message

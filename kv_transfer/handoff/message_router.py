"""Encode, decode and route the messages of hand-offs. Those that cannot be decoded or sent are dropped and counted.

    as a reader    HandshakeRequest, Claim, Finish ... ──connection that we opened──> holder
    as a holder    HandshakeAccepted, Granted ...      ──connection on which the reader asked──> reader

One thread uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from ..channel import Channel, Route
from ..errors import MalformedMessage
from ..protocol.messages import EngineKey, Message, decode, encode

logger = logging.getLogger(__name__)

MAX_READER_ROUTES = 4096


class MessageRouter:
    """Messages over one channel. Remembers for each reader the connection over which to answer it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._readers: dict[EngineKey, Route] = {}  # in order of their last message
        self.malformed = 0
        self.unsent = 0

    def receive(self) -> Iterator[tuple[Route, Message]]:
        """Receive all messages that have arrived. They are decoded as the caller iterates."""
        return self._decoded(self._channel.receive())

    def remember(self, reader: EngineKey, route: Route) -> None:
        """Answer a reader over this connection from now on. If there are too many, forget the longest silent one."""
        self._readers.pop(reader, None)
        self._readers[reader] = route
        if len(self._readers) > MAX_READER_ROUTES:
            del self._readers[next(iter(self._readers))]

    def to_reader(self, reader: EngineKey, message: Message) -> None:
        self.send(self._readers.get(reader), message)

    def send(self, route: Route | None, message: Message) -> None:
        """Send a message. A route of None means that the other end cannot be reached."""
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

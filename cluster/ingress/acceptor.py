"""Accepts the connections of a listener, as long as the process has file descriptors for them.

Event loops do that, too, but close a connection without a word, or never look at it, where descriptors have run out,
and lose one that they have just accepted when its listener is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from .shared_port import SETTLE_S, is_shared, take_no_more

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 32  # then the loop's others have their turn
PAUSE_S = 0.05


class Acceptor:
    """Gives each connection a protocol; those for which there is no descriptor wait in the kernel."""

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], max_descriptor: int) -> None:
        """Connections are accepted one at a time where their descriptors are above `max_descriptor`."""
        self._listener, self._protocol, self._max_descriptor = listener, protocol, max_descriptor
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._listener.listen(socket.SOMAXCONN)
        self._resume()

    async def close(self) -> None:
        """Returns when the port is closed and whoever had connected has a protocol."""
        if is_shared(self._listener):
            try:
                take_no_more(self._listener)
            except OSError as error:
                logger.warning("the kernel takes no filter (%s): connections that are being made may break", error)
            await asyncio.sleep(SETTLE_S)
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        while self._accept_one():
            pass
        self._listener.close()
        await asyncio.gather(*self._opening)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Return whether another one may follow at once."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:  # it has gone meanwhile
            return True
        except OSError as error:  # the process or the machine has no more descriptors, or no memory
            logger.warning("no connection is accepted for %g s: %s", PAUSE_S, error)
            self._wait()
            return False
        connection.setblocking(False)
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        if connection.fileno() > self._max_descriptor:  # the kernel gives out the lowest number that is free
            self._wait()
            return False
        return True

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:  # it has gone meanwhile
            logger.debug("a connection broke when it had been accepted: %s", error)
            connection.close()

    def _wait(self) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._resume)

"""Accepts a listener's connections as long as the process has file descriptors for them.

Event loops do that, too, but when descriptors run out they close connections without an answer or never accept them,
and they lose a connection that was just accepted when its listener closes.

A listener that shares its port (SO_REUSEPORT) can close here without breaking connections that are being made. The
kernel assigns a connection to a listener before it is accepted, and resets it if that listener closes. (With
`net.ipv4.tcp_migrate_req` = 1 other listeners of the port take it over, even from a killed process.) So a closing
listener first attaches a filter that drops packets which begin a connection: clients' kernels repeat them after a
second, and only the other listeners are left then. Meanwhile it accepts the connections that had already begun.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import struct
import sys
from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 32  # accepted connections after which other tasks of the loop have their turn
PAUSE_S = 0.05
LAST_S = 1.0  # for connections that still wait when the listener closes, while there are no descriptors for them
SETTLE_S = 0.5  # for handshakes under way; shorter than the second after which clients' kernels retry

SO_ATTACH_FILTER = 26  # linux/asm-generic/socket.h
TCP_FLAGS_BYTE, SYN, ACK = 13, 0x02, 0x10
LOAD_BYTE, AND, JUMP_IF_EQUAL, RETURN = 0x30, 0x54, 0x15, 0x06  # linux/bpf_common.h
DROP, PASS = 0, 0xFFFF_FFFF  # the number of bytes of a packet to keep

_DROP_SYN = (
    (LOAD_BYTE, 0, 0, TCP_FLAGS_BYTE),
    (AND, 0, 0, SYN | ACK),
    (JUMP_IF_EQUAL, 0, 1, SYN),
    (RETURN, 0, 0, DROP),
    (RETURN, 0, 0, PASS),
)


class Acceptor:
    """Gives each connection a protocol. Connections without a free descriptor wait in the kernel."""

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], max_descriptor: int) -> None:
        """Connections whose descriptors are above `max_descriptor` are accepted one at a time."""
        self._listener, self._protocol, self._max_descriptor = listener, protocol, max_descriptor
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._listener.listen(socket.SOMAXCONN)
        self._resume()

    async def close(self) -> None:
        """Close the port; return when every connection made before has a protocol."""
        if self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
            try:
                _drop_new_connections(self._listener)
            except OSError as error:
                logger.warning("the kernel refuses a filter (%s): connections that are being made may break", error)
            await asyncio.sleep(SETTLE_S)
        self._loop.remove_reader(self._listener)
        self._max_descriptor = sys.maxsize  # the last connections need not come one at a time
        give_up_at = self._loop.time() + LAST_S
        while True:
            while self._accept_one():
                pass
            if not self._end_pause() or self._loop.time() > give_up_at:
                break
            await asyncio.sleep(PAUSE_S)  # answers that end meanwhile free descriptors
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
        """Accept a connection; return whether another one may be accepted at once."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:  # the client has closed it meanwhile
            return True
        except OSError as error:  # the process or the machine has no more descriptors, or no memory
            logger.warning("no connection is accepted for %g s: %s", PAUSE_S, error)
            self._wait()
            return False
        connection.setblocking(False)
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        if connection.fileno() > self._max_descriptor:  # the kernel assigns the lowest free number
            self._wait()
            return False
        return True

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:  # the client has closed it meanwhile
            logger.debug("a connection broke right after it was accepted: %s", error)
            connection.close()

    def _end_pause(self) -> bool:
        """End the pause before the next connection, if there is one; return whether there was."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.cancel()
        return pause is not None

    def _wait(self) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._resume)


def _drop_new_connections(listener: socket.socket) -> None:
    """Drop packets that begin a connection from now on. A process may do that to its own socket without privileges.

    Raises `OSError` if the kernel has no such filters.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _DROP_SYN))
    listener.setsockopt(
        socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HxxxxxxP", len(_DROP_SYN), ctypes.addressof(program))
    )

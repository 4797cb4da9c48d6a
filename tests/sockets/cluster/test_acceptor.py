"""A listener that closes gives every connection that waits a protocol, also where descriptors are few."""

from __future__ import annotations

import asyncio
import socket

import pytest

from baton.cluster.ingress.acceptor import Acceptor

WAITING = 20


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


@pytest.mark.parametrize("max_descriptor", [1 << 20, 0], ids=["many descriptors", "few descriptors"])
async def test_connections_that_wait_at_a_close_are_served(max_descriptor: int) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=2 * WAITING) as listener:
        listener.setblocking(False)
        address = listener.getsockname()
        waiting = [await asyncio.open_connection(*address[:2]) for _ in range(WAITING)]
        await Acceptor(listener, Greeter, max_descriptor).close()
    for reader, writer in waiting:
        assert await reader.read() == b"hello"
        writer.close()

"""Gateways of one machine share a port, start and end: every client that connects gets an answer from one of them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.middleware import Drain
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.ingress.http_server import HttpServer, listen

from ...helpers.gateway_service import Service

pytestmark = pytest.mark.timeout(60)

ROUNDS = 6
CLIENTS = 4
ASK = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
ANSWER_S = 10.0


class Clients:
    """Threads that send requests in a loop, each request over a new connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self.answered = 0
        self.failed: list[str] = []

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        threads = [threading.Thread(target=self._ask_on) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=ANSWER_S) as connection:
                    connection.sendall(ASK)
                    answer = connection.recv(2**16)
            except OSError as error:
                self.failed.append(repr(error))
            else:
                if answer.startswith(b"HTTP/1.1 200"):
                    self.answered += 1
                else:
                    self.failed.append(repr(answer))


async def gateway(service: Service, model: ServedModel, port: int) -> tuple[HttpServer, socket.socket]:
    """Start a gateway, and return it with its listening socket."""
    drain, listener = Drain(), listen("127.0.0.1", port, share=True)
    server = HttpServer(
        create_app(service.cluster, model, GatewaySettings(), drain), drain, drain_s=0.0, drain_timeout_s=5.0
    )
    server.start(listener)
    while not server.has_started:
        await asyncio.sleep(0.005)
    return server, listener


@pytest.mark.slow
async def test_no_connection_breaks_while_gateways_start_and_end(
    start: Callable[..., Service], model: ServedModel
) -> None:
    service = start(Role.UNIFIED)
    oldest, listener = await gateway(service, model, 0)
    port = listener.getsockname()[1]
    clients = Clients(port)
    async with clients.asking():
        for _ in range(ROUNDS):
            newer, _ = await gateway(service, model, port)
            await oldest.drain()
            oldest = newer
    await oldest.drain()
    assert clients.failed == []
    assert clients.answered > ROUNDS


async def test_a_connection_made_before_the_port_closed_still_gets_an_answer(
    start: Callable[..., Service], model: ServedModel
) -> None:
    server, listener = await gateway(start(Role.UNIFIED), model, 0)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    draining = asyncio.create_task(server.drain())
    while listener.fileno() >= 0:
        await asyncio.sleep(0.001)
    for part in (ASK[:10], ASK[10:]):
        writer.write(part)
        await asyncio.sleep(0.05)
    answer = await asyncio.wait_for(reader.read(), ANSWER_S)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer.lower()
    writer.close()
    await draining


async def test_an_idle_connection_does_not_keep_a_gateway_alive(
    start: Callable[..., Service], model: ServedModel
) -> None:
    server, listener = await gateway(start(Role.UNIFIED), model, 0)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    draining = asyncio.create_task(server.drain())
    assert await asyncio.wait_for(reader.read(), ANSWER_S) == b""
    writer.close()
    await asyncio.wait_for(draining, ANSWER_S)

"""Clients that do not read their answers keep no connection open for ever."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from baton.cluster.ingress import http_transport
from baton.cluster.ingress.http_protocol import GuardedHttpProtocol

UNREAD_S = 0.4
SIZE = 16 << 20  # more than kernels buffer
REQUEST = b"GET /%b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer with `SIZE` bytes: at once; or first with half of them, and never with the rest ("/half"), or later."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % SIZE)]})
    if scope["path"] == "/whole":
        await send({"type": "http.response.body", "body": bytes(SIZE)})
        return
    await send({"type": "http.response.body", "body": bytes(SIZE // 2), "more_body": True})
    if scope["path"] != "/half":
        await send({"type": "http.response.body", "body": bytes(SIZE // 2)})  # waits until the first half is read


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[uvicorn.Server]:
    monkeypatch.setattr(http_transport, "UNREAD_S", UNREAD_S)
    config = uvicorn.Config(answer, port=0, http=GuardedHttpProtocol, ws="none", lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(20):
        while not server.started:
            await asyncio.sleep(0.005)
    yield server
    server.should_exit = server.force_exit = True
    await task


async def ask(server: uvicorn.Server, path: bytes) -> socket.socket:
    """Send a request from a client with a small window, and return its connection."""
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, server.servers[0].sockets[0].getsockname())
    await loop.sock_sendall(client, REQUEST % path)
    return client


@pytest.mark.parametrize("path", [b"half", b"whole", b"later"])
async def test_a_client_that_does_not_read_loses_its_connection(
    server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    if path == b"later":
        monkeypatch.setattr(http_transport, "STALLED_S", UNREAD_S)
    with await ask(server, path):
        async with asyncio.timeout(20):
            while not server.server_state.connections:
                await asyncio.sleep(0.005)
            while server.server_state.connections or server.server_state.tasks:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", [b"whole", b"later"])
async def test_a_client_that_reads_slowly_gets_its_whole_answer(
    server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    monkeypatch.setattr(http_transport, "STALLED_S", UNREAD_S)
    loop, received = asyncio.get_running_loop(), 0
    began = loop.time()
    with await ask(server, path) as client:
        async with asyncio.timeout(60):
            while piece := await loop.sock_recv(client, 1 << 20):
                received += len(piece)
                if loop.time() - began < 5 * UNREAD_S:
                    await asyncio.sleep(UNREAD_S / 8)
    assert received > SIZE

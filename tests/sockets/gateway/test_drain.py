"""A gateway that drains reports it, and finishes its open answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import httpx
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.middleware import Drain
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.ingress.http_server import HttpServer, listen

from ...helpers.gateway_service import Service, events

BODY = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 60, "ignore_eos": True}


@pytest.fixture
async def service(start: Callable[..., Service]) -> Service:
    return start(Role.UNIFIED)


def serve(service: Service, model: ServedModel, *, drain_s: float, drain_timeout_s: float) -> tuple[HttpServer, str]:
    drain, listener = Drain(), listen("127.0.0.1", 0, share=False)
    app = create_app(service.cluster, model, GatewaySettings(), drain)
    server = HttpServer(app, drain, drain_s=drain_s, drain_timeout_s=drain_timeout_s)
    server.start(listener)
    return server, f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
async def test_a_draining_gateway_is_unhealthy_and_still_serves_at_first(service: Service, model: ServedModel) -> None:
    server, url = serve(service, model, drain_s=3.0, drain_timeout_s=5)
    async with httpx.AsyncClient(base_url=url, timeout=10) as http:
        answer = await http.get("/health")
        assert (answer.status_code, answer.headers.get("connection")) == (200, None)
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0)  # let the drain begin
        health = await http.get("/health")
        assert health.status_code == 503
        assert "shutting down" in health.json()["error"]["message"]
        answer = await http.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert (await http.get("/live")).status_code == 200
        assert not draining.done()
        await asyncio.wait_for(draining, 30)
        with pytest.raises(httpx.ConnectError):
            await http.get("/live")
    assert server.has_ended


async def connect_again_and_again(url: str) -> None:
    while True:
        async with httpx.AsyncClient(base_url=url) as http:
            with contextlib.suppress(
                httpx.ReadError
            ):  # the kernel had made the connection, and the server never accepted it
                await http.get("/live")


async def test_open_answers_end_after_the_port_is_closed(service: Service, model: ServedModel) -> None:
    engine = service.cluster.members[0]
    server, url = serve(service, model, drain_s=0.0, drain_timeout_s=60)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.timeout(60):
        stream = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
        while not engine.core.stats().generation_tokens:
            await asyncio.sleep(0.001)
        engine.running.clear()
        draining = asyncio.create_task(server.drain())
        with pytest.raises(httpx.ConnectError):
            await connect_again_and_again(url)
        assert not stream.done()
        engine.running.set()
        *chunks, done = events((await stream).text)
        assert done == "[DONE]"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        await asyncio.wait_for(draining, 30)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_take_too_long_end_with_an_error(service: Service, model: ServedModel, stream: bool) -> None:
    engine = service.cluster.members[0]
    server, url = serve(service, model, drain_s=0.0, drain_timeout_s=1)
    async with httpx.AsyncClient(base_url=url, timeout=20) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": stream}))
        while not engine.submitted or (stream and not engine.core.stats().generation_tokens):
            await asyncio.sleep(0.001)
        engine.running.clear()
        await asyncio.wait_for(asyncio.gather(server.drain(), server.drain()), 30)
        answer = await asked
        assert answer.status_code == (200 if stream else 503)
        last = events(answer.text)[-1] if stream else answer.json()
        assert "shutting down" in last["error"]["message"]
    engine.running.set()
    await service.cluster.settled()

"""A gateway that listens on IPv6, as on a host without IPv4."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.middleware import Drain
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.ingress.http_server import HttpServer, listen
from baton.engine.net.sockets import endpoint

from ...helpers.gateway_service import Service
from ...helpers.ipv6 import needs_ipv6

ANSWER = "a relay team passes the baton"

pytestmark = needs_ipv6


@asynccontextmanager
async def served(service: Service, model: ServedModel, host: str, *, share: bool) -> AsyncIterator[int]:
    """Start a gateway that listens at `host`, and yield its port."""
    drain, listener = Drain(), listen(host, 0, share=share)
    app = create_app(service.cluster, model, GatewaySettings(), drain)
    server = HttpServer(app, drain, drain_s=0, drain_timeout_s=5)
    server.start(listener)
    yield listener.getsockname()[1]
    await server.drain()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True])
async def test_a_gateway_on_ipv6_answers_the_official_client(
    start: Callable[..., Service], model: ServedModel, share: bool
) -> None:
    service = start(Role.UNIFIED)
    service.script("who runs?", ANSWER)
    async with served(service, model, "::1", share=share) as port:
        url = f"http://{endpoint('::1', port)}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
            answer = await client.completions.create(model="tiny", prompt="who runs?", max_tokens=60)
            assert answer.choices[0].text == ANSWER
            stream = await client.completions.create(model="tiny", prompt="who runs?", max_tokens=60, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER


@pytest.mark.parametrize("client", ["::1", "127.0.0.1"])
async def test_a_gateway_on_all_addresses_answers_ipv4_and_ipv6_clients(
    start: Callable[..., Service], model: ServedModel, client: str
) -> None:
    async with served(start(Role.UNIFIED), model, "::", share=True) as port, httpx.AsyncClient(timeout=20) as http:
        assert (await http.get(f"http://{endpoint(client, port)}/live")).status_code == 200

"""Requests that do not arrive completely: the metrics count the status that the client gets."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from baton.cluster.ingress import http_protocol

from ...helpers.gateway_service import Service

HALF_A_BODY = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = httpx.URL(url)
    return await asyncio.open_connection(where.host, where.port)


async def counted(service: Service, route: str) -> dict[str, float]:
    """Return the counts of a route's answers, by status."""
    name = f'baton_http_responses_total{{route="{route}",status="'
    return {key.removeprefix(name)[:3]: n for key, n in (await service.metrics()).items() if key.startswith(name)}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "route", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
async def test_a_body_that_does_not_arrive_is_a_408_for_the_client_and_in_the_metrics(
    service: Service, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(http_protocol, "ARRIVAL_S", 0.2)
    async with service.over_tcp() as url:
        reader, writer = await connected(url)
        writer.write(HALF_A_BODY % route.encode())
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 408 ")
        writer.close()
    assert await counted(service, route) == {"408": 1.0}
    assert (await service.metrics())["baton_client_disconnects_total"] == 0


@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize"])
async def test_a_disconnect_before_the_end_of_a_request_is_a_499_without_a_traceback(
    service: Service, caplog: pytest.LogCaptureFixture, route: str
) -> None:
    async with service.over_tcp() as url:
        _, writer = await connected(url)
        writer.write(HALF_A_BODY % route.encode())
        await writer.drain()
        writer.close()
        async with asyncio.timeout(20):
            while not (statuses := await counted(service, route)):
                await asyncio.sleep(0.01)
    assert statuses == {"499": 1.0}
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("path", ["/" + "a" * 60_000, "/v1/models/" + "a" * 60_000])
async def test_a_long_path_is_not_sent_back(service: Service, path: str) -> None:
    async with service.over_tcp() as url, httpx.AsyncClient(base_url=url, timeout=20) as http:
        answer = await http.get(path)
    assert answer.status_code == 404
    assert "aaa..." in answer.json()["error"]["message"]
    assert len(answer.content) < 1000


async def test_a_long_origin_is_not_sent_back(service: Service) -> None:
    answer = await service.http.options("/v1/completions", headers={"origin": "https://" + "a" * 60_000})
    assert answer.status_code == 405
    assert len(answer.content) < 1000

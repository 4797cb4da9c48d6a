"""Clients that disconnect in any phase: engines abort the request, blocks are freed, and the disconnect is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import Role

from ...helpers.gateway_service import Service, until

BODY: dict[str, Any] = {"model": "tiny", "prompt": list(range(20, 120)), "max_tokens": 100, "ignore_eos": True}


@asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with service.over_tcp() as url, httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


COUNTER = "baton_client_disconnects_total"


async def count_disconnects(service: Service, disconnects: int = 1) -> None:
    async with asyncio.timeout(20):
        while (await service.metrics())[COUNTER] < disconnects:
            await asyncio.sleep(0.005)


async def check_all_is_released(service: Service, disconnects: int = 1) -> None:
    await count_disconnects(service, disconnects)
    await service.cluster.settled()
    samples = await service.metrics()
    assert samples[COUNTER] == disconnects
    assert samples["baton_gateway_requests_inflight"] == 0
    response = await service.complete("hello", max_tokens=2)
    assert response.status_code == 200


async def leave(request: asyncio.Task[httpx.Response]) -> None:
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


STREAM = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


@STREAM
async def test_a_disconnect_in_prefill_releases_everything(disaggregated: Service, stream: bool) -> None:
    prefill = disaggregated.cluster.members[0]
    async with client_of(disaggregated) as client:
        prefill.step_s = 0.02
        request = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
        await until(lambda: prefill.stats.num_requests_running)
        await leave(request)
        await check_all_is_released(disaggregated)


@STREAM
async def test_a_disconnect_while_waiting_for_an_engine_is_counted(start: Callable[..., Service], stream: bool) -> None:
    service = start(capacity_timeout_s=60)
    async with client_of(service) as client:
        request = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
        async with asyncio.timeout(20):
            while (await service.metrics())["baton_gateway_requests_inflight"] == 0:
                await asyncio.sleep(0.005)
        await leave(request)
        async with asyncio.timeout(20):
            while (await service.metrics())["baton_client_disconnects_total"] == 0:
                await asyncio.sleep(0.005)


@STREAM
async def test_a_disconnect_during_a_transfer_releases_everything(disaggregated: Service, stream: bool) -> None:
    prefill, decode = disaggregated.cluster.members
    disaggregated.cluster.wire.hold = True
    async with client_of(disaggregated) as client:
        request = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
        await until(lambda: decode.stats.num_requests_waiting_for_kv)
        assert prefill.stats.num_blocks_held > 0
        await leave(request)
        await count_disconnects(disaggregated)  # else the transfer might complete before the gateway notices
        disaggregated.cluster.wire.hold = False
        await check_all_is_released(disaggregated)
    assert prefill.connector.withdrawn == 1


@STREAM
async def test_a_disconnect_between_hand_off_and_decode_releases_everything(
    start: Callable[..., Service], stream: bool
) -> None:
    service = start(Role.PREFILL, Role.DECODE, capacity_timeout_s=60, local_prefill_max_tokens=0)
    prefill, decode = service.cluster.members
    prefill.running.clear()
    async with client_of(service) as client:
        request = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
        await until(lambda: prefill.submitted)
        decode.die()
        prefill.running.set()
        await until(lambda: prefill.stats.num_blocks_held)
        await leave(request)
        await until(lambda: prefill.connector.withdrawn == 1)
        service.cluster.start(Role.DECODE)
        service.cluster.start(Role.UNIFIED)
        await check_all_is_released(service)


@STREAM
async def test_a_disconnect_in_decode_releases_everything(disaggregated: Service, stream: bool) -> None:
    decode = disaggregated.cluster.members[1]
    decode.step_s = 0.02
    async with client_of(disaggregated) as client:
        request = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": stream}))
        await until(lambda: decode.stats.num_requests_running)
        await leave(request)
        await check_all_is_released(disaggregated)
        assert decode.stats.generation_tokens < BODY["max_tokens"] - 1


async def test_a_disconnect_within_a_stream_of_several_choices_releases_everything(service: Service) -> None:
    for engine in service.cluster.members:
        engine.step_s = 0.01
    body = {**BODY, "n": 4, "stream": True, "max_tokens": 60}
    async with client_of(service) as client:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            for _ in range(6):
                assert await anext(lines) is not None
        await check_all_is_released(service)


@STREAM
async def test_a_disconnect_ends_a_request_behind_which_another_one_waits(disaggregated: Service, stream: bool) -> None:
    decode = disaggregated.cluster.members[1]
    decode.step_s = 0.02
    body = json.dumps({**BODY, "stream": stream}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with disaggregated.over_tcp() as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request + request)
        await until(lambda: decode.stats.num_requests_running)
        writer.close()
        await check_all_is_released(disaggregated)
        assert decode.stats.generation_tokens < BODY["max_tokens"] - 1


async def test_a_disconnect_while_the_body_is_sent_releases_everything(service: Service) -> None:
    async with service.over_tcp() as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await check_all_is_released(service)


async def test_disconnects_do_not_affect_other_clients(disaggregated: Service) -> None:
    decode = disaggregated.cluster.members[1]
    decode.step_s = 0.005
    async with client_of(disaggregated) as client:
        body = {**BODY, "max_tokens": 40}
        requests = [asyncio.create_task(client.post("/v1/completions", json={**body, "seed": 5})) for _ in range(6)]
        await until(lambda: decode.stats.num_requests_running == 6)
        await leave(requests[0])
        await leave(requests[3])
        answers = [await request for request in (*requests[1:3], *requests[4:])]
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        await check_all_is_released(disaggregated, disconnects=2)

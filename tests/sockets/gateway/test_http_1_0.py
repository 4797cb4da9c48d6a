"""Clients of HTTP/1.0, byte for byte: they know no chunked encoding, so a stream ends with its connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ...helpers.gateway_service import Service, until

BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "ignore_eos": True, "seed": 3}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def asked(path: str, body: dict[str, Any] | None = None, *headers: str, method: str = "POST") -> bytes:
    """Return a request of HTTP/1.0, without Host."""
    content = b"" if body is None else json.dumps(body).encode()
    own = ["content-type: application/json", f"content-length: {len(content)}"] if content else []
    return "\r\n".join([f"{method} {path} HTTP/1.0", *own, *headers, "", ""]).encode() + content


async def connect(url: str) -> Connection:
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(url: str, request: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Return the status line, the headers, and all bytes until the gateway closes the connection."""
    reader, writer = await connect(url)
    writer.write(request)
    async with asyncio.timeout(20):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.split(b"\r\n")
    names = [line.partition(b": ")[0].lower() for line in lines]
    assert len(set(names)) == len(names), "no header may occur twice"
    return status, dict(zip(names, [line.partition(b": ")[2] for line in lines], strict=True)), body


def events_of(body: bytes) -> list[Any]:
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("header", [(), ("connection: keep-alive",)], ids=["plain", "keep-alive"])
async def test_a_stream_has_unchunked_events_and_ends_with_the_connection(
    service: Service, path: str, header: tuple[str, ...]
) -> None:
    fields = BODY if path == "/v1/completions" else CHAT
    async with service.over_tcp() as url:
        status, headers, body = await exchange(url, asked(path, {**fields, "stream": True}, *header))
    assert b" 200 " in status
    assert b"transfer-encoding" not in headers
    assert b"content-length" not in headers
    assert headers[b"connection"] == b"close"
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert events_of(body)[-1]["choices"][0]["finish_reason"]


async def test_the_streamed_text_is_that_of_the_whole_answer(service: Service) -> None:
    async with service.over_tcp() as url:
        _, _, streamed = await exchange(url, asked("/v1/completions", {**BODY, "stream": True}))
        _, headers, whole = await exchange(url, asked("/v1/completions", BODY))
    assert int(headers[b"content-length"]) == len(whole)
    text = "".join(event["choices"][0]["text"] for event in events_of(streamed))
    assert text == json.loads(whole)["choices"][0]["text"] != ""


async def test_events_are_sent_at_once_and_disconnects_are_noticed(service: Service) -> None:
    writes = service.cluster.members[-1]
    writes.step_s = 0.05
    async with service.over_tcp() as url:
        reader, writer = await connect(url)
        writer.write(asked("/v1/completions", {**BODY, "max_tokens": 100, "stream": True}))
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            first = await reader.readuntil(b"\n\n")
        assert b" 200 " in head.partition(b"\r\n")[0]
        assert "choices" in json.loads(first.removeprefix(b"data: "))
        await until(lambda: writes.stats.num_requests_running)  # the answer is not finished yet
        writer.close()
        await until(lambda: not writes.stats.num_requests_running)
    assert (await service.metrics())["baton_client_disconnects_total"] == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", ["/health", "/live", "/metrics", "/v1/models", "/v1/cluster/ranks"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_probes_and_scrapers_get_answers_with_a_length(service: Service, path: str, method: str) -> None:
    async with service.over_tcp() as url:
        status, headers, body = await exchange(url, asked(path, method=method))
    assert b" 200 " in status
    assert b"transfer-encoding" not in headers
    assert int(headers[b"content-length"]) > 0
    assert len(body) == (int(headers[b"content-length"]) if method == "GET" else 0)


async def test_a_refusal_has_a_length(service: Service) -> None:
    async with service.over_tcp() as url:
        status, headers, body = await exchange(url, asked("/v1/completions", {**BODY, "stream": True, "n": -1}))
    assert b" 400 " in status
    assert int(headers[b"content-length"]) == len(body)
    assert json.loads(body)["error"]["param"] == "n"


async def test_http_1_0_clients_get_no_100_continue(service: Service) -> None:
    async with service.over_tcp() as url:
        status, _, _ = await exchange(url, asked("/v1/completions", BODY, "expect: 100-continue"))
    assert b" 200 " in status


async def test_http_1_1_clients_still_get_chunks_on_a_persistent_connection(service: Service) -> None:
    request = asked("/v1/completions", {**BODY, "stream": True}, "host: gateway").replace(b"HTTP/1.0", b"HTTP/1.1")
    async with service.over_tcp() as url:
        reader, writer = await connect(url)
        for _ in range(2):
            writer.write(request)
            async with asyncio.timeout(20):
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readuntil(b"0\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            assert b"data: [DONE]" in body
        writer.close()

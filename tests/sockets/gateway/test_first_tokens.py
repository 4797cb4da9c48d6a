"""The gateway sends the first token to the client before it asks a decode engine to continue."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.ingress.http_server import listen

from ...helpers.fake_cluster import FakeEngine
from ...helpers.gateway_service import Service, until

PROMPT = "the quick brown fox"
ANSWER = "a relay team passes the baton"


class StreamingClient:
    """A client of one streamed answer, which reads as fast as `reads` allows."""

    def __init__(self, service: Service, **fields: Any) -> None:
        self.on_token: Callable[[], None] = lambda: None  # called with the first piece that holds a token
        self.reads = asyncio.Event()
        self.body = b""
        self._request = json.dumps({"model": "tiny", "prompt": PROMPT, "stream": True, **fields}).encode()
        self._was_sent = False
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.answer = asyncio.create_task(service.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._was_sent:
            await asyncio.Event().wait()  # the client stays connected
        self._was_sent = True
        return {"type": "http.request", "body": self._request}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            if not self.body:
                self.on_token()
            self.body += message["body"]
            await self.reads.wait()


@pytest.fixture
def decode(disaggregated: Service) -> FakeEngine:
    disaggregated.script(PROMPT, ANSWER)
    (engine,) = (each for each in disaggregated.cluster.members if each.record.role is Role.DECODE)
    return engine


async def test_the_first_token_is_sent_before_a_decode_engine_is_asked(
    disaggregated: Service, decode: FakeEngine
) -> None:
    told: list[int] = []
    client = StreamingClient(disaggregated)
    client.on_token = lambda: told.append(len(decode.submitted))
    client.reads.set()
    await asyncio.wait_for(client.answer, 20)
    assert told == [0]
    assert len(decode.submitted) == 1
    assert client.body.endswith(b"data: [DONE]\n\n")
    await disaggregated.cluster.settled()


async def test_a_client_that_does_not_read_does_not_delay_the_decode_engine(
    disaggregated: Service, decode: FakeEngine
) -> None:
    client = StreamingClient(disaggregated)
    await until(lambda: decode.submitted and not decode.streams)  # the decode engine has written the answer
    assert client.body.count(b"data: ") == 1
    client.reads.set()
    await asyncio.wait_for(client.answer, 20)
    assert client.body.endswith(b"data: [DONE]\n\n")
    await disaggregated.cluster.settled()


async def test_an_answer_of_one_token_needs_no_decode_engine(disaggregated: Service, decode: FakeEngine) -> None:
    answer = await disaggregated.complete(PROMPT, stop=ANSWER[0])
    assert answer.json()["choices"][0] | {"text": "", "finish_reason": "stop"} == answer.json()["choices"][0]
    assert not decode.submitted
    await disaggregated.cluster.settled()


async def test_a_client_that_leaves_between_the_first_token_and_the_hand_off_leaves_nothing_behind(
    disaggregated: Service, decode: FakeEngine
) -> None:
    client = StreamingClient(disaggregated)
    client.on_token = lambda: client.answer.cancel()
    client.reads.set()
    await asyncio.wait({client.answer}, timeout=20)
    await disaggregated.cluster.settled()
    assert not decode.streams


async def test_a_token_does_not_wait_until_the_client_has_confirmed_the_one_before() -> None:
    """TCP_NODELAY must be set with every event loop: asyncio sets it only on sockets with an explicit protocol."""
    no_delays: list[int] = []

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        no_delays.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen("127.0.0.1", 0, share=True)
    listener.listen()
    async with await asyncio.start_server(accepted, sock=listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b""
        writer.close()
    assert no_delays == [1]

"""Deadlines: the operator's settings, and the shorter ones that a client asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from baton.cluster.contracts import Role
from baton.cluster.gateway.api import response_writer

from ...helpers.gateway_service import Service, events

PROMPT = list(range(20, 60))
WHOLE, FIRST_TOKEN = "request-timeout-ms", "first-token-timeout-ms"
ROLES = pytest.mark.parametrize(
    "roles", [[Role.UNIFIED], [Role.PREFILL, Role.DECODE]], ids=["unified", "disaggregated"]
)


async def ask(service: Service, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **fields}
    return await service.http.post("/v1/completions", json=body, headers=headers or {})


def refusal(response: httpx.Response) -> tuple[int, str, bool]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["gpu_time_spent"]


@ROLES
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_may_ask_for_less_time_than_the_operator_gives(
    start: Callable[..., Service], roles: list[Role], stream: bool
) -> None:
    service = start(*roles)
    engine = service.cluster.members[0]
    engine.running.clear()
    response = await ask(service, {WHOLE: "200"}, stream=stream)
    assert refusal(response) == (408, "request_timeout", True)
    assert "0.2 s" in response.json()["error"]["message"]
    assert 0 < engine.submitted[0].timeout_s <= 0.2, "the engine must get the deadline, too"
    engine.running.set()
    await service.cluster.settled()


async def test_a_stream_that_outlasts_its_clients_time_ends_with_an_error(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE)
    service.cluster.members[1].step_s = 0.1
    *chunks, last = events((await ask(service, {WHOLE: "1000"}, stream=True, max_tokens=60)).text)
    assert chunks
    assert last["error"]["code"] == "request_timeout"
    await service.cluster.settled()


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"request_timeout_s": 0.2}, "request_timeout"), ({"first_token_timeout_s": 0.2}, "first_token_timeout")],
)
async def test_a_client_cannot_ask_for_more(start: Callable[..., Service], limits: dict[str, float], code: str) -> None:
    service = start(Role.UNIFIED, **limits)
    engine = service.cluster.members[0]
    engine.running.clear()
    assert refusal(await ask(service, {WHOLE: "9000", FIRST_TOKEN: "9000"}))[1] == code
    assert engine.submitted[0].timeout_s <= limits.get("request_timeout_s", 9.0), "the operator's limit must hold"
    engine.running.set()
    await service.cluster.settled()


@ROLES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [True, False], ids=["client", "operator"])
async def test_a_late_first_token_is_an_error_and_ends_every_attempt(
    start: Callable[..., Service], roles: list[Role], stream: bool, asked: bool
) -> None:
    service = start(*roles, **({} if asked else {"first_token_timeout_s": 0.2}))
    service.cluster.members[0].running.clear()
    response = await ask(service, {FIRST_TOKEN: "200"} if asked else {}, stream=stream)
    assert refusal(response) == (408, "first_token_timeout", True)
    assert "0.2 s" in response.json()["error"]["message"]
    service.cluster.members[0].running.set()
    await service.cluster.settled()
    assert service.cluster.members[0].stats.num_steps == 0, "the prompt must never be computed"


async def test_a_request_without_an_engine_waits_no_longer_than_its_deadline(start: Callable[..., Service]) -> None:
    assert refusal(await ask(start(), {FIRST_TOKEN: "100"})) == (408, "first_token_timeout", False)


@pytest.mark.slow
async def test_an_answer_whose_first_token_came_in_time_may_take_longer(start: Callable[..., Service]) -> None:
    service = start(Role.PREFILL, Role.DECODE)
    service.cluster.members[1].step_s = 0.06
    for stream in (False, True):
        response = await ask(service, {FIRST_TOKEN: "1000"}, stream=stream, max_tokens=30, n=2)
        assert response.status_code == 200
        assert not stream or events(response.text)[-1] == "[DONE]"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [WHOLE, FIRST_TOKEN])
@pytest.mark.parametrize("value", ["", "0", "-5", "1.5", "1e3", "soon", "2s", "9" * 10, "٣"])
async def test_invalid_times_are_refused_with_the_name_of_the_header(service: Service, name: str, value: str) -> None:
    response = await service.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": PROMPT}, headers=[(name.encode(), value.encode())]
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert "from 1 to 999999999" in error["message"]
    assert not any(engine.submitted for engine in service.cluster.members)


@pytest.mark.parametrize("name", [WHOLE, FIRST_TOKEN])
async def test_short_client_deadlines_open_no_circuit(start: Callable[..., Service], name: str) -> None:
    """Requests that expire by the engine's own clock open no circuit either."""
    service = start(Role.UNIFIED, breaker={"failures": 2, "open_s": 60})
    engine = service.cluster.members[0]
    engine.running.clear()
    statuses = [(await ask(service, {name: "20"})).status_code for _ in range(8)]
    assert statuses == [408] * 8
    ranks = (await service.http.get("/v1/cluster/ranks")).json()["data"]
    assert [rank["circuit"] for rank in ranks] == ["closed"]
    engine.running.set()
    await service.cluster.settled()


async def serve_a_client_that_does_not_read(service: Service, path: str, body: dict[str, Any]) -> None:
    """Return when the gateway gives up on sending the answer's body."""
    arriving = [{"type": "http.request", "body": json.dumps({"model": "tiny", **body}).encode(), "more_body": False}]
    never = asyncio.Event()

    async def receive() -> Message:
        if not arriving:
            await never.wait()
        return arriving.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await never.wait()

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    await asyncio.wait_for(service.app(scope, receive, send), 20)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "stream": True}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}),
        ("/tokenize", {"prompt": "hello"}),
    ],
    ids=["stream", "whole", "tokens"],
)
async def test_a_client_that_does_not_read_keeps_nothing_beyond_its_deadline(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(response_writer, "LAST_SEND_S", 0.01, raising=False)
    service = start(Role.UNIFIED, request_timeout_s=0.5)
    await serve_a_client_that_does_not_read(service, path, body)
    assert service.bodies.budget.held_bytes == 0
    assert (await service.http.get("/load")).json() == {"server_load": 0}
    await service.cluster.settled()

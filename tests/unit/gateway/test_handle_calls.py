"""Calls from other Serve applications: they use the API through a deployment handle, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from ray.serve._private.thirdparty.get_asgi_route_name import get_asgi_route_name

from baton.cluster.contracts import Role
from baton.cluster.ingress import replica
from baton.cluster.ingress.replica import CHAT, COMPLETIONS, MESSAGES, RESPONSES, CallFailed, call, stream

from ...helpers.gateway_service import Service

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


async def test_a_call_returns_the_answer_of_the_same_http_request(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    service.script_chat("hello", "the quick brown fox")
    answer = await call(service.app, CHAT, HELLO)
    over_http = (await service.chat("hello")).json()
    assert answer["choices"] == over_http["choices"]
    assert answer["choices"][0]["message"]["content"] == "the quick brown fox"
    assert answer["usage"] == over_http["usage"]


async def test_a_stream_yields_each_event_parsed(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    service.script_chat("hello", "the quick brown fox")
    chunks = [chunk async for chunk in stream(service.app, CHAT, HELLO)]
    assert len(chunks) > 2
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == "the quick brown fox"
    events = [event async for event in stream(service.app, RESPONSES, {"model": "tiny", "input": "hello"})]
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")


async def test_messages_are_called_as_chats_are(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, max_attempts=1, capacity_timeout_s=0.1, retry_budget=0, retry_budget_min=0)
    service.script_chat("hello", "the quick brown fox")
    body = HELLO | {"max_tokens": 60}
    answer = await call(service.app, MESSAGES, body)
    assert answer["content"] == [{"type": "text", "text": "the quick brown fox"}]
    events = [event async for event in stream(service.app, MESSAGES, body)]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == "the quick brown fox"
    for refused in (call(service.app, MESSAGES, HELLO), anext(stream(service.app, MESSAGES, HELLO))):
        with pytest.raises(CallFailed, match="400: 'max_tokens'"):
            await refused
    broken = stream(service.app, MESSAGES, body | {"ignore_eos": True})
    await anext(broken)
    service.cluster.members[0].die()
    with pytest.raises(CallFailed) as failed:
        [event async for event in broken]
    assert (failed.value.status, failed.value.error["type"]) == (0, "overloaded_error")


async def test_a_refusal_is_raised_with_its_status_and_field(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    wrong = HELLO | {"temperature": -1}
    with pytest.raises(CallFailed) as refused:
        await call(service.app, CHAT, wrong)
    assert (refused.value.status, refused.value.error["param"]) == (400, "temperature")
    with pytest.raises(CallFailed) as refused:
        [chunk async for chunk in stream(service.app, CHAT, wrong)]
    assert (refused.value.status, refused.value.error["param"]) == (400, "temperature")
    again = pickle.loads(pickle.dumps(refused.value))
    assert (again.status, again.error, str(again)) == (400, refused.value.error, str(refused.value))


async def test_a_call_needs_a_key_if_clients_need_one(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=["secret"])
    with pytest.raises(CallFailed) as refused:
        await call(service.app, COMPLETIONS, {"model": "tiny", "prompt": "hello", "max_tokens": 1})
    assert refused.value.status == 401
    answer = await call(service.app, COMPLETIONS, {"model": "tiny", "prompt": "hello", "max_tokens": 1}, "secret")
    assert answer["usage"]["completion_tokens"] == 1


async def test_a_stream_that_is_closed_ends_its_request(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 60, "ignore_eos": True}
    async with contextlib.aclosing(stream(service.app, COMPLETIONS, body)) as chunks:
        await anext(chunks)
    async with asyncio.timeout(10):
        while any(view.outstanding for view in service.cluster.engines()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "fields"), [(COMPLETIONS, {"prompt": "hello", "max_tokens": 60}), (RESPONSES, {"input": "hello"})]
)
async def test_a_stream_whose_engine_fails_for_good_raises(
    start: Callable[..., Service], path: str, fields: dict[str, Any]
) -> None:
    service = start(max_attempts=1, capacity_timeout_s=0.1, retry_budget=0, retry_budget_min=0)
    engine = service.cluster.start(Role.UNIFIED)
    chunks = stream(service.app, path, {"model": "tiny", "ignore_eos": True, **fields})
    await anext(chunks)
    engine.die()
    with pytest.raises(CallFailed) as failed:
        [chunk async for chunk in chunks]
    assert failed.value.status == 0
    assert failed.value.error["type"] == "service_unavailable"


async def test_serves_proxy_gets_the_same_answers_as_the_gateways_own_port(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve reads the ASGI application before the gateway has started, looks up its routes, and adds a prefix."""
    behind = replica.app_behind_proxy()
    service = start(Role.UNIFIED)
    monkeypatch.setattr(replica, "app", service.app)
    scope = {"type": "http", "path": "/v1/models", "method": "GET", "root_path": ""}
    assert get_asgi_route_name(behind, scope) == "", "Serve must count all requests under the application's prefix"
    for root in ("", "/prefix"):
        transport = httpx.ASGITransport(behind, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as proxy:
            for path in ("/v1/models", "/health", "/nowhere"):
                answer, own = await proxy.get(root + path), await service.http.get(path)
                assert answer.status_code == own.status_code
                if path != "/nowhere":
                    assert answer.json() == own.json()

"""Requests of one session go to one engine, and conversations are routed to their cached prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.cluster.contracts import Role

from ...helpers.gateway_service import Service


async def ask(service: Service, prompt: list[int], session_id: str | None) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    headers = {} if session_id is None else {"x-session-id": session_id}
    return await service.http.post("/v1/completions", json=body, headers=headers)


def users(service: Service, role: Role) -> list[int]:
    return [engine.record.rank for engine in service.cluster.members if engine.record.role is role and engine.submitted]


async def test_a_session_stays_in_its_engines(start: Callable[..., Service]) -> None:
    roles = [Role.PREFILL] * 4 + [Role.DECODE] * 4
    service, stranger = start(*roles), start(*roles)
    for index in range(8):
        assert (await ask(service, [index] * 20, "s")).status_code == 200
        assert (await ask(stranger, [index] * 20, None)).status_code == 200
    assert [len(users(service, role)) for role in (Role.PREFILL, Role.DECODE)] == [1, 1]
    assert len(users(stranger, Role.PREFILL)) > 1


async def test_gateways_agree_on_a_sessions_home(start: Callable[..., Service]) -> None:
    services = [start(*[Role.UNIFIED] * 6, gateway_id=name) for name in ("one", "other")]
    for service in services:
        await ask(service, [5] * 20, "s")
    assert users(services[0], Role.UNIFIED) == users(services[1], Role.UNIFIED)


@pytest.mark.slow
async def test_a_conversation_without_a_session_is_routed_to_its_blocks(start: Callable[..., Service]) -> None:
    service = start(*[Role.UNIFIED] * 4)
    history = list(range(4, 60))
    await ask(service, history, None)
    await asyncio.gather(*(ask(service, [index] * 20, None) for index in range(12)))
    members = service.cluster.members
    (home,) = [engine for engine in members if history in [each.prompt_token_ids for each in engine.submitted]]
    answers = [await ask(service, [*history, index], None) for index in range(5)]
    assert {answer.headers["x-baton-path"] for answer in answers} == {"unified; reason=prefix-hit"}
    assert [engine.prompt_token_ids for engine in home.submitted][-5:] == [[*history, index] for index in range(5)]


@pytest.mark.parametrize("session_id", ["", " ", "x" * 257])
async def test_a_session_without_a_name_is_refused(service: Service, session_id: Any) -> None:
    response = await ask(service, [1], session_id)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-session-id"

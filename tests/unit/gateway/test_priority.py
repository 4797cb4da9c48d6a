"""Priorities: a request overtakes others only with a key that has the right to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.api_keys import LOOK_S, ApiKeys, InvalidKeys
from baton.cluster.gateway.settings import GatewaySettings

from ...helpers.gateway_service import Clock, Service

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
}
LOWEST, HIGHEST = -(2**31), 2**31 - 1


async def asked(service: Service, path: str, priority: int, key: str = "") -> dict[str, Any] | None:
    """Return the refusal, or None if the request was served."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await service.http.post(
        path, json={"model": "tiny", **BODIES[path], "priority": priority}, headers=headers
    )
    if answer.status_code == 200:
        return None
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("keys", [[], ["sk-one"]], ids=["open", "with keys"])
async def test_no_request_overtakes_others_without_the_right_to(
    start: Callable[..., Service], keys: list[str], path: str
) -> None:
    service = start(Role.UNIFIED, api_keys=keys)
    key = keys[0] if keys else ""
    for priority in (LOWEST, -1):
        refusal = await asked(service, path, priority, key)
        assert refusal is not None
        assert (refusal["param"], refusal["code"]) == ("priority", "priority_not_allowed")
        assert "gateway.min_priority" in refusal["message"]
    assert not service.cluster.members[0].submitted
    for priority in (0, 1, HIGHEST):
        assert await asked(service, path, priority, key) is None
    assert [request.priority for request in service.cluster.members[0].submitted] == [0, 1, HIGHEST]
    for priority in (LOWEST - 1, HIGHEST + 1):
        refusal = await asked(service, path, priority, key)
        assert refusal is not None
        assert refusal["param"] == "priority"


async def test_no_running_answer_is_preempted_for_a_client_without_the_right(start: Callable[..., Service]) -> None:
    """Four answers fill the engine's blocks; a higher priority of a fifth request would preempt them."""
    service = start(Role.UNIFIED)
    (engine,) = service.cluster.members
    engine.step_s = 0.001
    running = [
        asyncio.create_task(service.complete([5 + index] * 225, max_tokens=30, ignore_eos=True, seed=1))
        for index in range(4)
    ]
    async with asyncio.timeout(20):
        while engine.stats.num_requests_running < 4:
            await asyncio.sleep(0.001)
    answer = await service.complete([9] * 240, max_tokens=1, priority=LOWEST)
    assert answer.status_code == 400
    assert engine.stats.num_preemptions == 0
    assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}


async def test_an_operator_may_give_the_right_to_everyone(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, min_priority=-5)
    assert await asked(service, "/v1/completions", -5) is None
    refusal = await asked(service, "/v1/completions", -6)
    assert refusal is not None
    assert "-5" in refusal["message"]


async def test_a_key_has_the_right_that_its_line_states_now(start: Callable[..., Service], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-plain\nsk-urgent  min_priority=-10\n")
    service = start(Role.UNIFIED, api_keys_file=str(file))
    assert await asked(service, "/v1/chat/completions", -10, "sk-urgent") is None
    assert await asked(service, "/v1/chat/completions", -11, "sk-urgent") is not None
    assert await asked(service, "/v1/chat/completions", -1, "sk-plain") is not None
    file.write_text("sk-plain min_priority=-1\nsk-urgent\n")
    async with asyncio.timeout(10):
        while await asked(service, "/v1/chat/completions", -1, "sk-plain") is not None:
            await asyncio.sleep(0.05)
    assert await asked(service, "/v1/chat/completions", -1, "sk-urgent") is not None


def least(keys: ApiKeys, key: str) -> int | None:
    client = keys.caller(key.encode())
    return None if client is None else client.min_priority


def test_a_line_overrides_the_settings_and_earlier_lines(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("sk-config min_priority=-7\nsk-two min_priority=0\nsk-three min_priority=-2147483648\nsk-four\n")
    keys = ApiKeys(GatewaySettings(api_keys=["sk-config"], api_keys_file=str(file), min_priority=-3), clock)
    names = ["sk-config", "sk-two", "sk-three", "sk-four", "sk-five"]
    assert [least(keys, key) for key in names] == [-7, 0, LOWEST, -3, None]
    file.write_text("sk-two min_priority=-1\nsk-two\n")
    clock.now_s += LOOK_S
    assert [least(keys, key) for key in names] == [-3, -3, None, None, None]


@pytest.mark.parametrize(
    "words",
    [
        *("priority=-1", "min_priority", "min_priority=", "min_priority=low", "min_priority=-1.5", "min_priority=1"),
        *("min_priority=-2147483649", "min_priority=-99999999999", "min_priority=-1 min_priority=-2", "sk-second"),
        "min_priority=-1 and more",
    ],
)
def test_an_invalid_line_is_refused_and_its_keys_are_not_quoted(tmp_path: Path, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"sk-one\nsk-secret {words}\n")
    with pytest.raises(InvalidKeys, match=r"line 2 .*min_priority") as refused:
        ApiKeys(GatewaySettings(api_keys_file=str(file)))
    assert "sk-" not in str(refused.value).replace(str(file), "")


@pytest.mark.parametrize("least", [1, LOWEST - 1])
def test_the_setting_is_bounded(least: int) -> None:
    with pytest.raises(ValueError, match="min_priority"):
        GatewaySettings(min_priority=least)

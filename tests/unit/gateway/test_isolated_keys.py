"""Isolation of prefix caches between API keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway.settings import GatewaySettings

from ...helpers.gateway_service import Service

PROMPT = list(range(5, 105))  # six whole blocks
KEYS = ["sk-one", "sk-two"]


async def cached(service: Service, key: str, **fields: Any) -> int:
    """Return how many tokens of the prompt the engine had cached."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, **fields}
    answer = await service.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_prefixes_of_one_key_are_not_found_with_another(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=KEYS, isolate_keys=True)
    assert [await cached(service, key) for key in ("sk-one", "sk-one", "sk-two", "sk-two")] == [0, 96, 0, 96]


async def test_a_salt_separates_the_prefixes_of_one_key_and_gives_access_to_no_others(
    start: Callable[..., Service],
) -> None:
    service = start(Role.UNIFIED, api_keys=KEYS, isolate_keys=True)
    await cached(service, "sk-one")
    (asked,) = service.cluster.members[0].submitted
    assert await cached(service, "sk-one", cache_salt="mine") == 0
    assert await cached(service, "sk-one", cache_salt="mine") == 96
    assert await cached(service, "sk-two", cache_salt=asked.cache_salt) == 0
    assert await cached(service, "sk-two", cache_salt=asked.cache_salt.rstrip("/")) == 0


async def test_engines_get_no_keys(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=KEYS, isolate_keys=True)
    await cached(service, "sk-one")
    (asked,) = service.cluster.members[0].submitted
    assert "sk-one" not in asked.cache_salt


async def test_keys_share_prefixes_unless_they_are_isolated(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=KEYS)
    assert [await cached(service, key) for key in KEYS] == [0, 96]


async def test_every_gateway_isolates_a_key_in_the_same_way(start: Callable[..., Service]) -> None:
    """Every gateway derives the same isolation from a key."""
    salts = []
    for _ in range(2):
        service = start(Role.UNIFIED, api_keys=KEYS, isolate_keys=True)
        await cached(service, "sk-two")
        salts.append(service.cluster.members[0].submitted[0].cache_salt)
    assert salts[0] == salts[1]


def test_without_keys_there_is_nothing_to_isolate() -> None:
    with pytest.raises(ValueError, match="isolate_keys: there are no API keys"):
        GatewaySettings(isolate_keys=True)
    GatewaySettings(isolate_keys=True, api_keys_file="/somewhere")

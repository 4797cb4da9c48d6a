"""Migration: an answer that two engines wrote is equal in every field to the answer of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.engine.core.layout import BLOCK_SIZE

from ...helpers.gateway_service import Service, events, until

PROMPT = list(range(20, 60))
FLEETS = {
    "unified": [Role.UNIFIED] * 2,
    "disaggregated": [Role.PREFILL, Role.DECODE, Role.DECODE],
    "no second decode engine": [Role.PREFILL, Role.DECODE, Role.UNIFIED],
}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "seed": 7},
    "seeded": {"temperature": 0.9, "seed": 7},
    "logprobs": {"logprobs": 3, "seed": 7},
    "several choices": {"n": 3, "seed": 7},
    "echo": {"echo": True, "logprobs": 2, "seed": 7},
    "prompt logprobs": {"prompt_logprobs": 1, "seed": 7},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 7},
}
CAN_STREAM = [name for name in ASKED if name != "prompt logprobs"]
LENGTH: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}


def die_once(service: Service, after_tokens: int) -> None:
    """Let the first engine that has generated so many tokens die, and no other."""
    members = service.cluster.members

    def spare_the_others() -> None:
        for engine in members:
            engine.die_after_tokens = None

    for engine in members:
        engine.die_after_tokens, engine.on_death = after_tokens, spare_the_others


async def check_one_died(service: Service) -> None:
    assert [engine.alive for engine in service.cluster.members].count(False) == 1
    await service.cluster.settled()


@pytest.mark.exhaustive
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("roles", FLEETS.values(), ids=FLEETS)
@pytest.mark.parametrize("after_tokens", [1, 2, 9])
async def test_whole_answers_are_equal(
    start: Callable[..., Service], roles: list[Role], asked: dict[str, Any], after_tokens: int
) -> None:
    expected = (await start(Role.UNIFIED).complete(PROMPT, **LENGTH, **asked)).json()
    service = start(*roles)
    die_once(service, after_tokens)
    answer = (await service.complete(PROMPT, **LENGTH, **asked)).json()
    assert (answer["choices"], answer["usage"]) == (expected["choices"], expected["usage"])
    await check_one_died(service)


def joined(body: str, count: int) -> list[dict[str, Any]]:
    """Join the chunks of each choice."""
    *chunks, done = events(body)
    assert done == "[DONE]"
    choices = [{"text": "", "logprobs": [], "finish_reason": None} for _ in range(count)]
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None, "no chunk may follow the finish reason"
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            choice["logprobs"] += (part["logprobs"] or {}).get("token_logprobs") or []
    return choices


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CAN_STREAM)
@pytest.mark.parametrize("after_tokens", [1, 5])
async def test_streams_are_equal(start: Callable[..., Service], name: str, after_tokens: int) -> None:
    asked = ASKED[name]
    count = asked.get("n", 1)
    undisturbed = await start(Role.UNIFIED).complete(PROMPT, **LENGTH, **asked, stream=True)
    service = start(Role.PREFILL, Role.DECODE, Role.DECODE)
    die_once(service, after_tokens)
    answer = await service.complete(PROMPT, **LENGTH, **asked, stream=True)
    assert joined(answer.text, count) == joined(undisturbed.text, count)
    await check_one_died(service)


@pytest.mark.parametrize("after_tokens", [2, 4, 6])
async def test_a_stop_string_that_two_engines_wrote_is_found(start: Callable[..., Service], after_tokens: int) -> None:
    service = start(Role.UNIFIED, Role.UNIFIED)
    service.script("tell", "one two three four five")
    die_once(service, after_tokens)
    choice = (await service.complete("tell", stop=["three fo"], max_tokens=60)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two ", "stop")
    await check_one_died(service)


async def test_if_a_decode_engine_dies_before_the_transfer_the_holder_recomputes_one_block(
    start: Callable[..., Service],
) -> None:
    """The offer is only for the dead engine, but the engine that holds the blocks has the prompt in its cache."""
    cost = {"block_release_s": 0.0}  # otherwise 3 blocks of so small a pool cost too much
    service = start(*[Role.PREFILL] * 2, *[Role.DECODE] * 2, cost=cost)
    expected = (await start(Role.UNIFIED).complete(PROMPT, **LENGTH, seed=7)).json()["choices"]
    members = service.cluster.members
    service.cluster.wire.hold = True
    answer = asyncio.create_task(service.complete(PROMPT, **LENGTH, seed=7))
    await until(lambda: any(engine.stats.num_requests_waiting_for_kv for engine in members))
    (reader,) = [engine for engine in members if engine.stats.num_requests_waiting_for_kv]
    (holder,) = [engine for engine in members if engine.stats.num_blocks_held]
    service.cluster.wire.hold = False
    reader.die()
    response = await answer
    assert response.headers["x-baton-path"] == "recomputed; reason=engine-gone; rung=other-prefill"
    assert response.json()["choices"] == expected
    assert [len(engine.submitted) for engine in members[:2]] == ([2, 0] if holder is members[0] else [0, 2])
    computed = holder.stats.prompt_tokens + 1 - holder.stats.prefix_cache_hits  # plus the token that it had sampled
    assert computed - len(PROMPT) <= BLOCK_SIZE
    await service.cluster.settled()

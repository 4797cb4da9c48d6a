"""The gateway counts the values of a body from its bytes, without parsing it, and the memory of all bodies."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from starlette.requests import Request

from baton.cluster.gateway.bodies.body import (
    INLINE_BYTES,
    INLINE_CONTAINERS,
    MAX_COMMAS,
    MAX_CONTAINERS,
    VALUES_OF_CONTAINER,
    Body,
    StructureScan,
    read_body,
)
from baton.cluster.gateway.bodies.budget import LARGE_SHARE, SMALL_BYTES, TOKEN_ID_BYTES, MemoryBudget
from baton.cluster.gateway.errors import ApiError

CHARACTERS = 'ab\\"[{,}]\u00e9\n'


def any_text(chance: random.Random) -> str:
    return "".join(chance.choice(CHARACTERS) for _ in range(chance.randrange(6)))


def any_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth > 3 or kind < 0.4:
        return any_text(chance)
    if kind < 0.6:
        return [any_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind < 0.9:
        return {f"{n}{any_text(chance)}": any_value(chance, depth + 1) for n in range(chance.randrange(4))}
    return 5


def structure(value: Any) -> tuple[int, int]:
    """Return the numbers of containers and commas, counted in the parsed value."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [structure(each) for each in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(each[0] for each in inner), max(0, len(value) - 1) + sum(each[1] for each in inner)


@pytest.mark.parametrize("seed", range(200))
def test_counts_equal_those_of_the_parsed_value_with_any_split(seed: int) -> None:
    chance = random.Random(seed)
    value = any_value(chance)
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5, separators=chance.choice([None, (",", ":")])).encode()
    scan = StructureScan()
    while text:
        cut = chance.randrange(1, 9)
        scan.feed(text[:cut])
        text = text[cut:]
    assert (scan.containers, scan.commas) == structure(value)


def arriving(chunks: list[bytes], taken: list[int]) -> Request:
    async def receive() -> dict[str, Any]:
        taken.append(len(chunks[0]))
        chunk = chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    return Request(scope, receive)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("item", [b"[]", b"{}", b'{"role":"user","content":""}', b"[[],[]]"])
async def test_a_body_of_many_values_is_refused_before_it_has_arrived(item: bytes) -> None:
    content = b'{"prompt":[' + b",".join([item] * (8 << 20)) + b"]}"
    content = content[: 16 << 20]
    taken: list[int] = []
    chunks = [content[at : at + (64 << 10)] for at in range(0, len(content), 64 << 10)]
    with MemoryBudget(1 << 30).reservation() as held, pytest.raises(ApiError, match=f"{MAX_CONTAINERS}") as refused:
        await read_body(arriving(chunks, taken), 16 << 20, held)
    assert refused.value.status == 400
    assert refused.value.code == "too_many_values"
    assert sum(taken) <= MAX_CONTAINERS * (len(item) + 1) + (128 << 10)


async def test_brackets_and_commas_inside_a_string_do_not_count() -> None:
    content = json.dumps({"prompt": '[{,"\\' * 1_000_000}).encode()
    body = await read_body(arriving([content], []), 1 << 30, MemoryBudget(1 << 30).reservation())
    with body:
        assert body.size == len(content)
        assert body.small_text() is None


async def test_a_million_token_ids_are_within_the_limit_of_values() -> None:
    content = json.dumps({"prompt": [7] * 1_000_000}).encode()
    assert MAX_COMMAS > 1_000_000
    with await read_body(arriving([content], []), 1 << 30, MemoryBudget(1 << 30).reservation()) as body:
        assert body.size == len(content)


@pytest.mark.parametrize(
    ("value", "is_small"),
    [
        ({"prompt": "x" * (INLINE_BYTES - 100)}, True),
        ({"prompt": "x" * INLINE_BYTES}, False),
        ({"prompt": "[,{" * 5_000}, True),
        ({"prompt": [1] * VALUES_OF_CONTAINER * (INLINE_CONTAINERS - 2)}, True),
        ({"prompt": [1] * VALUES_OF_CONTAINER * (INLINE_CONTAINERS + 2)}, False),
        ({"x": [[]] * (INLINE_CONTAINERS - 200)}, True),
        ({"x": [[]] * (INLINE_CONTAINERS + 1)}, False),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_small_bodies_are_those_of_few_bytes_and_few_values(value: Any, *, is_small: bool) -> None:
    with Body() as body:
        await body.add(json.dumps(value).encode())
        assert (body.small_text() is not None) is is_small


def hold(limit_bytes: int, *sizes: int) -> None:
    budget = MemoryBudget(limit_bytes)
    for size in sizes:
        budget.reservation().hold_body(size)


def test_large_bodies_may_use_part_of_the_memory_and_small_ones_all_of_it() -> None:
    limit = 64 * SMALL_BYTES
    part = limit // LARGE_SHARE
    hold(limit, part, *[SMALL_BYTES] * 48)
    for sizes in ([part, SMALL_BYTES + 1], [part, *[SMALL_BYTES] * 49]):
        with pytest.raises(ApiError) as refused:
            hold(limit, *sizes)
        assert (refused.value.status, refused.value.code) == (503, "memory_full")
        assert int(refused.value.headers["retry-after"]) >= 1


def test_held_memory_is_released() -> None:
    budget = MemoryBudget(1 << 20)
    with budget.reservation() as held:
        held.hold_body(200_000)
        assert (budget.held_bytes, budget.large_bytes) == (200_000, 200_000)
        held.hold_prompts(1000)
        assert (budget.held_bytes, budget.large_bytes) == (1000 * TOKEN_ID_BYTES, 0)
        with pytest.raises(ApiError, match="Try again"):
            held.hold_prompts(1 << 20)
    assert (budget.held_bytes, budget.large_bytes) == (0, 0)

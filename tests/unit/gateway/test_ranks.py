"""The ranks that a gateway reaches, and requests that name one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from baton.cluster.contracts import LoadBalancing, Reach, Role
from baton.cluster.gateway.routing.ranks import spell_ranks

from ...helpers.fakes import make_gateway
from ...helpers.gateway_service import Service
from .engine_views import view

HYBRID = Reach(mode=LoadBalancing.HYBRID, node_id="b")
MIX = [(Role.PREFILL, "a"), (Role.DECODE, "a"), (Role.DECODE, "b"), (Role.UNIFIED, "b"), (Role.PREFILL, "b")]


def start_mix(start: Callable[..., Service], reach: Reach, **settings: Any) -> Service:
    service = start(**settings)
    service.cluster.reach = reach
    for role, node in MIX:
        service.cluster.start(role, node=node)
    return service


@pytest.mark.parametrize(
    ("at_gateway", "stats", "running"),
    [
        (12, {"num_requests_waiting": 3, "num_requests_waiting_for_kv": 1}, 8),  # the others are in a prefill step
        (1, {"num_requests_waiting": 3, "num_requests_running": 9}, 9),  # the others belong to other gateways
        (300, {}, 256),  # at most `max_num_seqs`
    ],
)
def test_requests_in_a_step_count_as_running(at_gateway: int, stats: dict[str, int], running: int) -> None:
    assert view(0, outstanding=at_gateway, **stats).num_running == running


def test_requests_of_an_engine_without_a_status_count_as_running() -> None:
    for at_gateway, running in ((0, 0), (12, 12), (300, 256)):
        told_nothing = msgspec.structs.replace(view(0, outstanding=at_gateway), stats=None)
        assert told_nothing.num_running == running


async def ask(service: Service, rank: object, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 4, "ignore_eos": True, **fields}
    return await service.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})


def used(service: Service) -> list[int]:
    return [engine.record.rank for engine in service.cluster.members if engine.submitted]


@pytest.mark.parametrize(
    ("reach", "reached"),
    [
        (Reach(), [0, 1, 2, 3, 4]),
        (HYBRID, [0, 2, 3, 4]),
        (Reach(mode=LoadBalancing.HYBRID, node_id="c"), [0, 4]),
        (Reach(mode=LoadBalancing.EXTERNAL, rank=1), [0, 1, 4]),
        (Reach(mode=LoadBalancing.EXTERNAL, rank=3), [0, 3, 4]),
    ],
)
async def test_a_gateway_reaches_its_ranks_and_every_prefill_rank(
    start: Callable[..., Service], reach: Reach, reached: list[int]
) -> None:
    service = start_mix(start, reach)
    table = (await service.http.get("/v1/cluster/ranks")).json()["data"]
    assert [rank["rank"] for rank in table] == [0, 1, 2, 3, 4]
    assert [rank["rank"] for rank in table if rank["reachable"]] == reached
    assert [rank["stats"] is not None for rank in table] == [rank["reachable"] for rank in table]
    assert [rank["num_running"] for rank in table] == [0 if rank["reachable"] else None for rank in table]
    answers = any(role.writes_answers for rank, (role, _) in enumerate(MIX) if rank in reached)
    assert (await service.http.get("/health")).status_code == (200 if answers else 503)


async def test_requests_stay_within_reach(start: Callable[..., Service]) -> None:
    service = start_mix(start, HYBRID)
    answers = await asyncio.gather(*(service.complete([i] * 20, max_tokens=3, ignore_eos=True) for i in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert used(service) == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("rank", "path", "others"),
    [
        (0, "disaggregated", {1, 2}),
        (1, "disaggregated", {0, 4}),
        (3, "unified", set()),
    ],
)
async def test_a_pinned_rank_takes_part_in_every_request(
    start: Callable[..., Service], rank: int, path: str, others: set[int]
) -> None:
    service = start_mix(start, Reach())
    answers = await asyncio.gather(*(ask(service, rank, prompt=[i] * 20) for i in range(12)))
    assert {answer.headers["x-baton-path"].partition(";")[0] for answer in answers} == {path}
    assert len(service.cluster.members[rank].submitted) == 12
    assert set(used(service)) == {rank} | others


@pytest.mark.parametrize("rank", [5, -1, "", "one", "1.0", "1,2", "٣", "9" * 100, "0x1"])
async def test_the_refusal_of_a_rank_out_of_reach_lists_those_in_reach(
    start: Callable[..., Service], rank: object
) -> None:
    service = start_mix(start, HYBRID)
    headers = {b"X-data-parallel-rank": str(rank).encode()}
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    response = await service.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("X-data-parallel-rank", "unknown_rank")
    assert "0, 2-4" in error["message"]
    assert used(service) == []


async def test_a_rank_of_another_node_is_out_of_reach(start: Callable[..., Service]) -> None:
    service = start_mix(start, HYBRID)
    assert (await ask(service, 1)).status_code == 400
    assert (await ask(service, 2)).status_code == 200


async def test_a_pinned_rank_that_dies_is_waited_for_and_never_replaced(start: Callable[..., Service]) -> None:
    service = start_mix(start, Reach(), capacity_timeout_s=0.2)
    service.cluster.members[3].die_after_tokens = 2
    response = await ask(service, 3, max_tokens=30)
    assert response.status_code == 503
    assert used(service) == [3]
    assert (await ask(service, 3)).status_code == 400, "the gateway must know by now that the rank is gone"


async def test_all_serving_gateways_are_listed_with_the_ranks_that_they_reach(start: Callable[..., Service]) -> None:
    service = start_mix(start, HYBRID, gateway_id="here")
    node_a = Reach(mode=LoadBalancing.HYBRID, node_id="a")
    starting = msgspec.structs.replace(make_gateway("starting"), is_serving=False)
    there = make_gateway("there", reach=node_a)
    service.cluster.gateways = [make_gateway("here", reach=HYBRID, port=8001), starting, there]
    table = (await service.http.get("/v1/cluster/ranks")).json()
    assert table["gateway"] == "here"
    assert [(g["gateway"], g["port"], g["load_balancing"], g["ranks"]) for g in table["gateways"]] == [
        ("there", 8000, "hybrid", [0, 1, 4]),
        ("here", 8001, "hybrid", [0, 2, 3, 4]),
    ]


def test_ranks_are_spelt_as_runs() -> None:
    assert spell_ranks([]) == ""
    assert spell_ranks([3]) == "3"
    assert spell_ranks([4, 0, 1, 2, 7, 8]) == "0-2, 4, 7-8"

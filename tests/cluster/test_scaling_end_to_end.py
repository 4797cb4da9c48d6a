"""An application that shrinks and is upgraded under load, deployed as `serve deploy` does. No answer may be lost.

The tests of this module share one cluster and run in the order of the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ..helpers.served import eventually
from .deployed import Cluster, Load, Question, ask_undisturbed, in_thread, load_on, roles, settled

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("scaled"), answer_tokens=200)  # long enough: no drain is over at once
    try:
        cluster.deploy()
        cluster.wait_for(lambda ranks: roles(ranks) == {"prefill": 1, "decode": 1})
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def questions(cluster: Cluster) -> list[Question]:
    return ask_undisturbed(cluster, seed=5, count=16, longest=400)


async def test_gateways_take_other_settings_without_another_process_or_a_broken_stream(
    cluster: Cluster, tmp_path: Path
) -> None:
    processes, keys = cluster.processes(), tmp_path / "keys"
    keys.write_text("sk-one\n")
    body = {"model": "baton-demo", "prompt": "Once", "max_tokens": 1}

    async def status(key: str) -> int:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
            return (await client.post(f"{cluster.url}/v1/completions", json=body)).status_code

    async def comes_to(key: str, wanted: int) -> None:
        async with asyncio.timeout(30):
            while await status(key) != wanted:
                await asyncio.sleep(0.1)

    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60.0)
    long = {"ignore_eos": True}
    async with (
        client,
        await client.completions.create(
            model="baton-demo", prompt="Once", max_tokens=1900, stream=True, extra_body=long
        ) as stream,
    ):
        events = aiter(stream)
        await anext(events)
        limits = {"max_inflight_requests": 1, "request_timeout_s": 5.0}
        await in_thread(cluster.give_gateways, gateway=limits | {"api_keys_file": str(keys)})
        await comes_to("sk-none", 401)
        assert await status("sk-one") == 429, "the stream is the one request that may run"
        await in_thread(cluster.give_gateways, gateway={"max_inflight_requests": 0})
        await in_thread(eventually, lambda: cluster.metric("baton_gateway_settings_refused") == 1, 30.0, "it is told")
        assert await status("sk-none") == 401, "those of before hold"
        *_, last = [event async for event in events]
    assert last.choices[0].finish_reason == "length"
    await comes_to("sk-one", 200)
    await in_thread(cluster.give_gateways)
    await comes_to("sk-none", 200)
    assert cluster.processes() == processes


@pytest.mark.exhaustive
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_fleet_that_shrinks_under_load_loses_no_answer(
    cluster: Cluster, questions: list[Question], role: str
) -> None:
    whole = {"prefill": 1, "decode": 1} | {role: 2}
    drains = cluster.metric("baton_drains_total")
    retries = cluster.metric("baton_request_retries_total")
    await in_thread(cluster.scale, **whole)
    await in_thread(cluster.wait_for, lambda ranks: settled(ranks, **whole))
    async with load_on(cluster, questions) as load:
        await in_thread(cluster.scale, prefill=1, decode=1)
        await in_thread(cluster.wait_for, lambda ranks: any(rank["draining"] for rank in ranks))
        await in_thread(cluster.wait_for, lambda ranks: settled(ranks, prefill=1, decode=1))
        before = len(load.answers)
        await asyncio.sleep(1.0)
    assert load.lost == []
    assert load.reconnects == 0
    assert load.right == len(load.answers) > before
    assert cluster.metric("baton_drains_total") == drains + 1
    assert cluster.metric("baton_drain_handed_over_total") == 0
    assert cluster.metric("baton_request_retries_total") == retries


async def upgrade(cluster: Cluster, questions: list[Question], setting: dict[str, Any]) -> tuple[Load, bool]:
    """Upgrade under load; return the load, and whether the layout of blocks is the old one."""
    old = {rank["engine_id"]: rank["fingerprint"] for rank in cluster.ranks()}
    cluster.args["engine"] |= setting
    seen: list[list[dict[str, Any]]] = []

    def is_new(ranks: list[dict[str, Any]]) -> bool:
        seen.append(ranks)
        return settled(ranks, prefill=1, decode=1) and not any(rank["engine_id"] in old for rank in ranks)

    async with load_on(cluster, questions, streams=2) as load:
        await in_thread(cluster.deploy)
        await in_thread(cluster.wait_for, is_new)
        before = len(load.answers)
        await asyncio.sleep(1.0)
    assert load.lost == []
    assert len(load.answers) > before
    assert any({rank["engine_id"] in old for rank in ranks} == {True, False} for ranks in seen), "side by side"
    return load, {rank["fingerprint"] for rank in cluster.ranks()} == set(old.values())


async def test_an_upgrade_to_the_same_layout_under_load_changes_no_answer(
    cluster: Cluster, questions: list[Question]
) -> None:
    cluster.args["fleets"]["decode"]["drain_timeout_s"] = 0.0  # for the next test
    load, same_layout = await upgrade(cluster, questions, {"max_num_seqs": 48})
    assert same_layout
    assert load.right == len(load.answers)


async def test_what_the_last_engine_of_its_kind_hands_over_goes_on_in_its_successor(
    cluster: Cluster, questions: list[Question]
) -> None:
    """An operator's drain, without time for what runs."""
    (old,) = [rank for rank in cluster.ranks() if rank["role"] == "decode"]
    async with load_on(cluster, questions, streams=2) as load:
        await in_thread(cluster.drain, old["rank"])
        await in_thread(
            cluster.wait_for,
            lambda ranks: settled(ranks, prefill=1, decode=1) and old["engine_id"] not in str(ranks),
        )
    assert load.lost == []
    assert load.right == len(load.answers) > 0
    assert cluster.metric("baton_drain_handed_over_total") > 0
    assert cluster.metric("baton_request_retries_total", reason="engine-leaving") > 0


async def test_an_upgrade_to_another_layout_under_load_loses_no_answer(
    cluster: Cluster, questions: list[Question]
) -> None:
    """The new cache rounds what it keeps: what was to be recalled is right in either version."""
    load, same_layout = await upgrade(cluster, questions, {"kv_cache_dtype": "fp8"})
    assert not same_layout
    assert [pair for pair in load.answers if not pair[1].startswith(pair[0].value)] == []


async def test_a_setting_that_gateways_keep_replaces_them_and_no_engine(cluster: Cluster) -> None:
    before = cluster.processes()
    await in_thread(cluster.give_gateways, gateway={"body_processes": 1})
    await in_thread(cluster.wait_for, lambda _: cluster.processes()["gateways"] != before["gateways"])
    assert cluster.processes()["engines"] == before["engines"]
    assert httpx.get(f"{cluster.url}/health").status_code == 200

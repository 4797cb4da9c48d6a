"""Applications that grow, shrink and are upgraded under load, deployed as by `serve deploy`. No answer may be lost.

The first has no engine until the first request, grows under load, shrinks without it, and returns to no engine; the
second one, in its place, is scaled and upgraded. The tests share one Ray cluster and run in the order of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ..helpers.served import eventually
from .deployed import Cluster, Load, Question, RayCluster, ask_undisturbed, in_thread, load_on, roles, settled

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]


BLOCK_BYTES = 16 * 4 * 6 * 2 * 2 * 64  # of the demo model: tokens x float32 x layers x heads x planes x dimensions


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    with contextlib.closing(RayCluster()) as ray:
        yield ray


@pytest.fixture(scope="module")
def autoscaled(ray: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Start an application whose decode fleet scales by used KV blocks: unlike latencies, they fit any machine."""
    cluster = Cluster(ray, tmp_path_factory.mktemp("autoscaled"), name="autoscaled", answer_tokens=100)
    fleets = cluster.args["fleets"]
    for fleet, most in ((fleets["prefill"], 1), (fleets["decode"], 2)):
        del fleet["replicas"]
        fleet |= {"min_replicas": 0, "max_replicas": most}
    fleets["decode"]["engine"] = {"kv_cache_memory_bytes": 100 * BLOCK_BYTES}
    cluster.args["engine"]["max_model_len"] = 1024
    cluster.args["autoscaling"] = {
        "ttft_s": 100.0,
        "inter_token_s": 10.0,
        "look_back_period_s": 5.0,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 4.0,
        "downscale_to_zero_delay_s": 8.0,
    }
    cluster.deploy()
    cluster.wait_for(lambda ranks: ranks == [])
    return cluster


@pytest.fixture(scope="module")
def first_questions(autoscaled: Cluster) -> list[Question]:
    """Return questions whose first answer is the application's first, requested when no engine exists."""
    assert httpx.get(f"{autoscaled.url}/health").status_code == 200, "or no balancer would send the first request"
    return ask_undisturbed(autoscaled, seed=6, count=16, longest=500)


async def test_the_first_request_is_answered_though_no_engine_was_there(
    autoscaled: Cluster, first_questions: list[Question]
) -> None:
    assert all(question.answer for question in first_questions)
    assert set(roles(autoscaled.ranks())) == {"prefill", "decode"}


async def test_load_makes_the_decode_fleet_grow_and_its_end_makes_it_shrink(
    autoscaled: Cluster, first_questions: list[Question]
) -> None:
    async with load_on(autoscaled, first_questions, streams=10) as busy:
        await in_thread(autoscaled.wait_for, lambda ranks: roles(ranks) == {"prefill": 1, "decode": 2})
    assert busy.lost == []
    assert busy.right == len(busy.answers)
    drains = autoscaled.metric("baton_drains_total")
    async with load_on(autoscaled, first_questions, streams=1) as quiet:
        await in_thread(autoscaled.wait_for, lambda ranks: len(ranks) == 2 and roles(ranks)["decode"] == 1)
    assert quiet.lost == []
    assert quiet.right == len(quiet.answers) > 0
    assert autoscaled.metric("baton_drains_total") == drains + 1
    assert autoscaled.metric("baton_drain_handed_over_total") == 0


async def test_an_application_that_nobody_asks_gives_everything_back(autoscaled: Cluster) -> None:
    await in_thread(autoscaled.wait_for, lambda ranks: ranks == [])


@pytest.fixture(scope="module")
def cluster(ray: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    folder = tmp_path_factory.mktemp("scaled")
    cluster = Cluster(ray, folder, name="scaled", answer_tokens=200)  # long enough that no drain ends at once
    cluster.deploy()
    cluster.wait_for(lambda ranks: roles(ranks) == {"prefill": 1, "decode": 1})
    return cluster


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
        assert await status("sk-none") == 401, "the previous ones stay in effect"
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
    """Upgrade under load; return the load, and whether the layout of blocks is unchanged."""
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
    """An operator drains the engine, with no time for its running requests."""
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
    """The new cache rounds its values: answers must hold the right value under either version."""
    load, same_layout = await upgrade(cluster, questions, {"kv_cache_dtype": "fp8"})
    assert not same_layout
    assert [pair for pair in load.answers if not pair[1].startswith(pair[0].value)] == []


async def test_a_setting_that_gateways_keep_replaces_them_and_no_engine(cluster: Cluster) -> None:
    before = cluster.processes()
    await in_thread(cluster.give_gateways, gateway={"body_processes": 1})
    await in_thread(cluster.wait_for, lambda _: cluster.processes()["gateways"] != before["gateways"])
    assert cluster.processes()["engines"] == before["engines"]
    # The gateway that ends answers 503 here while it drains, so that balancers leave it.
    health = f"{cluster.url}/health"
    await in_thread(eventually, lambda: httpx.get(health).status_code == 200, 30.0, "the new gateway answers alone")

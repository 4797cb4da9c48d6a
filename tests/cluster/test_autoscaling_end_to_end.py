"""An application that has no engine until somebody asks, grows under load, shrinks without it, and ends where it began.

The tests of this module share one cluster and run in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from .deployed import Cluster, Question, ask_undisturbed, in_thread, load_on, roles

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

BLOCK_BYTES = 16 * 4 * 6 * 2 * 2 * 64  # of the demo model: tokens x float32 x layers x heads x planes x dimensions


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start an application whose decode fleet grows by its KV blocks: unlike latencies, they fit any machine."""
    cluster = Cluster(tmp_path_factory.mktemp("autoscaled"), answer_tokens=100)
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
    try:
        cluster.deploy()
        cluster.wait_for(lambda ranks: ranks == [])
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def questions(cluster: Cluster) -> list[Question]:
    """Their first answer is the application's first: it comes from no engine at all."""
    assert httpx.get(f"{cluster.url}/health").status_code == 200, "or no balancer would send the first request"
    return ask_undisturbed(cluster, seed=6, count=16, longest=500)


async def test_the_first_request_is_answered_though_no_engine_was_there(
    cluster: Cluster, questions: list[Question]
) -> None:
    assert all(question.answer for question in questions)
    assert set(roles(cluster.ranks())) == {"prefill", "decode"}


async def test_load_makes_the_decode_fleet_grow_and_its_end_makes_it_shrink(
    cluster: Cluster, questions: list[Question]
) -> None:
    async with load_on(cluster, questions, streams=10) as busy:
        await in_thread(cluster.wait_for, lambda ranks: roles(ranks) == {"prefill": 1, "decode": 2})
    assert busy.lost == []
    assert busy.right == len(busy.answers)
    drains = cluster.metric("baton_drains_total")
    async with load_on(cluster, questions, streams=1) as quiet:
        await in_thread(cluster.wait_for, lambda ranks: len(ranks) == 2 and roles(ranks)["decode"] == 1)
    assert quiet.lost == []
    assert quiet.right == len(quiet.answers) > 0
    assert cluster.metric("baton_drains_total") == drains + 1
    assert cluster.metric("baton_drain_handed_over_total") == 0


async def test_an_application_that_nobody_asks_gives_everything_back(cluster: Cluster) -> None:
    await in_thread(cluster.wait_for, lambda ranks: ranks == [])

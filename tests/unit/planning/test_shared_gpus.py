"""Engines that share a GPU: each takes its share of the memory, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.planning.fleet_memory import Traffic
from baton.cluster.planning.placement import Machines
from baton.cluster.planning.plan import Plan, make_plan
from baton.cluster.spec import load_spec

MODEL = Path(__file__).parents[3] / "configs/models/qwen3-8b"
GB = 10**9


def plan_of(fleets: dict[str, Any], engine: dict[str, Any], num_gpus: int) -> Plan:
    args = {"model": str(MODEL), "engine": engine, "fleets": fleets}
    return make_plan(load_spec(args), Machines(num_gpus, 80 * GB), Traffic())


def test_engines_may_share_a_gpu_and_the_plan_recommends_mps() -> None:
    fleets = {"prefill": {"replicas": 2, "num_gpus": 0.4}, "decode": {"replicas": 2, "num_gpus": 0.5}}
    plan = plan_of(fleets, {}, 2)
    assert (plan.num_nodes, plan.refusals) == (1, [])
    assert any("nvidia-cuda-mps-control" in note for note in plan.notes)
    shares = [fleet.gpu_bytes / (80 * GB) for fleet in plan.fleets]
    assert shares == pytest.approx([0.4 * 0.9, 0.5 * 0.9], rel=1e-3)
    on_cpu = plan_of({"unified": {"num_gpus": 0.5}}, {"device": "cpu"}, 8)
    assert not any("nvidia-cuda-mps-control" in note for note in on_cpu.notes)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_engines_that_share_a_gpu_with_more_memory_than_it_has_are_refused(num_gpus: int) -> None:
    fleets = {"unified": {"replicas": 2, "num_gpus": 0.5, "engine": {"kv_cache_memory_bytes": 30 * GB}}}
    plan = plan_of(fleets, {}, num_gpus)
    (refusal,) = plan.refusals
    assert refusal.startswith("node 0: the engines on its GPU 0 take ")
    assert refusal.endswith(" GB of 80.0: give those that share a GPU less KV memory")
    assert plan_of({"unified": {**fleets["unified"], "num_gpus": 0.6}}, {}, 2).refusals == [], "each has its own GPU"


def gpus_of(fleets: dict[str, Any], num_gpus: int) -> list[tuple[int, int | None]]:
    return [(rank.node, rank.gpu) for rank in plan_of(fleets, {}, num_gpus).ranks]


def test_shares_of_a_gpu_are_placed_as_ray_places_them() -> None:
    """Fill a GPU before the next one: a share is never divided between two."""
    assert gpus_of({"unified": {"replicas": 2, "num_gpus": 0.5}}, 2) == [(0, 0), (0, 0)]
    assert gpus_of({"unified": {"replicas": 5, "num_gpus": 0.4}}, 2) == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0)]
    assert gpus_of({"unified": {"replicas": 10, "num_gpus": 0.1}}, 1) == [(0, 0)] * 10
    mixed = {"unified": {"num_gpus": 0.7}, "prefill": {"num_gpus": 0.5}, "decode": {"num_gpus": 0.3}}
    assert gpus_of(mixed, 2) == [(0, 0), (0, 1), (0, 0)]
    assert gpus_of({"unified": {"num_gpus": 0.5}, "prefill": {}, "decode": {"num_gpus": 2}}, 3) == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    assert gpus_of({"unified": {"num_gpus": 0}}, 2) == [(0, None)]
    sliver = {"prefill": {"num_gpus": 0.0001}, "decode": {"num_gpus": 1}}
    assert gpus_of(sliver, 1) == [(0, 0), (1, 0)], "a GPU is not whole any more"


@pytest.mark.parametrize(
    ("num_gpus", "engine", "share"),
    [
        (0.4, {}, 0.4),
        (1, {}, 1),
        (None, {}, 1),
        (0.4, {"gpu_share": 0.3}, 0.3),
        (0.4, {"gpu_memory_utilization": 0.8}, 1),
        (0.4, {"kv_cache_memory_bytes": GB}, 1),
        (0.4, {"kv_cache_memory_bytes": None}, 0.4),
        (0.4, {"device": "cpu"}, 1),
    ],
)
def test_an_engine_has_the_share_of_memory_of_its_gpu_that_it_reserves_unless_its_memory_is_set(
    num_gpus: float | None, engine: dict[str, Any], share: float
) -> None:
    args = {"model": str(MODEL), "fleets": {"unified": {"num_gpus": num_gpus, "engine": engine}}}
    assert load_spec(args).engine_config(Role.UNIFIED).gpu_share == share

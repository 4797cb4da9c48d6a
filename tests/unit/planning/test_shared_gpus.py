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


def test_engines_that_share_a_gpu_with_more_memory_than_it_has_are_refused() -> None:
    fleets = {"unified": {"replicas": 2, "num_gpus": 0.5, "engine": {"kv_cache_memory_bytes": 30 * GB}}}
    plan = plan_of(fleets, {}, 1)
    (refusal,) = plan.refusals
    assert refusal.startswith("node 0: its engines take ")
    assert refusal.endswith(" GB of its GPUs' 80.0: give those that share a GPU less KV memory")


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

"""Plans refuse KV blocks that a GPU has no room for, and note requests that the model's length would cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.planning.fleet_memory import Traffic
from baton.cluster.planning.placement import Machines
from baton.cluster.planning.plan import Plan, make_plan
from baton.cluster.planning.sizing import GB
from baton.cluster.spec import load_spec

SHAPE = Path(__file__).parents[3] / "configs/models/qwen3-32b"
BLOCK_BYTES = 2 * 64 * 8 * 128 * 2 * 16  # keys and values, layers, heads, dimensions, bytes, tokens


def plan_of(engine: dict[str, Any], traffic: Traffic = Traffic()) -> Plan:
    args = {"model": str(SHAPE), "engine": engine, "fleets": {"unified": {}}}
    return make_plan(load_spec(args), Machines(8, 80 * GB), traffic)


@pytest.mark.parametrize(
    ("engine", "setting"),
    [
        ({"kv_cache_memory_bytes": 200 * GB}, "kv_cache_memory_bytes"),
        ({"num_gpu_blocks_override": 200 * GB // BLOCK_BYTES}, "num_gpu_blocks_override"),
        ({"num_gpu_blocks_override": 200 * GB // BLOCK_BYTES, "kv_cache_memory_bytes": GB}, "num_gpu_blocks_override"),
    ],
)
def test_blocks_that_a_gpu_has_no_room_for_are_refused(engine: dict[str, Any], setting: str) -> None:
    (refusal,) = plan_of(engine).refusals
    assert refusal.startswith(f"unified: {setting}: its KV blocks take 200.0 GB, and ")
    assert " GB are left for them: give less" in refusal


def test_blocks_that_just_fit_are_not_refused() -> None:
    assert plan_of({"kv_cache_memory_bytes": 8 * GB, "gpu_memory_utilization": 0.5}).refusals == []


def test_a_load_of_requests_that_are_too_long_is_noted() -> None:
    assert plan_of({"max_model_len": 4096}, Traffic(1.0, 4000, 96)).notes == []
    (note,) = plan_of({"max_model_len": 4096}, Traffic(1.0, 4000, 97)).notes
    assert note == "unified: requests of 4000 + 97 tokens are longer than max_model_len, 4096, and would be cut off"

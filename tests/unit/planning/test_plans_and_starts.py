"""Plans and starts give KV blocks the same memory, if a start finds the memory that the plan assumes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from baton.cluster.cli.plan import print_plan
from baton.cluster.planning.fleet_memory import FleetPlan, Traffic
from baton.cluster.planning.placement import Machines
from baton.cluster.planning.plan import Plan, make_plan
from baton.cluster.planning.sizing import GB
from baton.cluster.spec import load_spec
from baton.engine import EngineConfig, build_engine
from baton.engine.models import make_model
from baton.engine.parallel.groups import ALL_ALONE
from baton.engine.parallel.member import Member
from baton.engine.startup import cpu
from baton.engine.startup.cpu import CpuStartup
from baton.engine.startup.device import RankContext
from baton.engine.startup.kv_size import ENOUGH_FREE_BYTES, KVSize, kv_budget, size_kv_cache
from baton.engine.startup.memory import GpuMemory
from baton.engine.startup.model_config import read_model_config
from baton.engine.startup.step_sizes import step_sizes

from ...helpers.checkpoints import write_checkpoint

CONFIGS = Path(__file__).parents[3] / "configs"
SHAPES = ["models/qwen3-8b", "models/qwen3-32b", "models/llama-3.3-70b", "models/deepseek-v3", "demo/hybrid"]
NO_GPUS = Machines(0)
DRAFTS = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}}


def plan_of(model: str, engine: dict[str, Any], machines: Machines = NO_GPUS, **fleet: Any) -> Plan:
    spec = load_spec({"model": model, "engine": engine, "fleets": {"unified": fleet}})
    return make_plan(spec, machines, Traffic())


def fleet_of(plan: Plan) -> FleetPlan:
    assert plan.refusals == []
    (fleet,) = plan.fleets
    return fleet


def blocks_of(fleet: FleetPlan) -> list[int]:
    return [arena.num_blocks for arena in fleet.arenas]


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts find as much free memory as plans assume."""
    monkeypatch.setattr(cpu, "available_memory_bytes", lambda: ENOUGH_FREE_BYTES)


def size_at_start(model: str, engine: dict[str, Any]) -> KVSize:
    """Size the KV cache as the first rank of an engine on a CPU does, all of whose ranks are on one machine."""
    config = EngineConfig.from_args({"model": model, "load_format": "dummy", **engine})
    model_config, ranks = read_model_config(config), config.tensor_parallel_size
    member = Member(tensor_parallel_size=ranks, num_local=ranks)
    context = RankContext(config, model_config, torch.device("cpu"), member, ALL_ALONE)
    steps = step_sizes(config, model_config, None)
    return size_kv_cache(
        config,
        CpuStartup(context, steps).measure_memory(make_model(model_config)),
        context.own_caches,
        max_num_seqs=steps.max_num_seqs,
        context_len=model_config.max_model_len,
    )


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"tensor_parallel_size": 2},
        {"max_model_len": 512, "max_num_seqs": 7},
        {"kv_cache_memory_bytes": GB},
        {"kv_cache_memory_bytes": GB, "max_model_len": 512, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 100},
        {"num_gpu_blocks_override": 100, "kv_cache_memory_bytes": GB},
        {**DRAFTS, "max_num_seqs": 200},
        {**DRAFTS, "max_num_seqs": 200, "tensor_parallel_size": 2},
        {**DRAFTS, "max_num_seqs": 4000, "tensor_parallel_size": 2},  # also the small hybrid could fill all memory
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_engine_on_a_cpu_gets_the_blocks_that_are_planned(shape: str, engine: dict[str, Any]) -> None:
    model = str(CONFIGS / shape)
    start, fleet = size_at_start(model, engine), fleet_of(plan_of(model, engine))
    assert blocks_of(fleet) == list(start.blocks_by_group)
    assert fleet.max_model_len == start.max_model_len


@pytest.mark.parametrize("engine", [{}, {**DRAFTS, "max_num_seqs": 10}, {"kv_cache_memory_bytes": 10**7}], ids=str)
@pytest.mark.parametrize("model", ["demo/model", "demo/hybrid", "windows"])
def test_a_started_engine_has_the_blocks_that_were_planned(model: str, engine: dict[str, Any], tmp_path: Path) -> None:
    folder = CONFIGS / model
    if model == "windows":
        folder = write_checkpoint(tmp_path, "gpt_oss", sliding_window=24, max_position_embeddings=4096)
    args = {**engine, "device": "cpu", "load_format": "dummy"}
    fleet = fleet_of(plan_of(str(folder), args))
    started = build_engine(EngineConfig.from_args({"model": str(folder), "skip_tokenizer_init": True, **args}))
    try:
        groups = started.core.config.groups
        assert blocks_of(fleet) == [group.num_blocks for group in groups]
        assert fleet.max_model_len == started.core.config.max_model_len
    finally:
        started.close()


def test_ranks_on_one_machine_share_the_memory_for_blocks_in_plans() -> None:
    model = str(CONFIGS / "models/qwen3-8b")
    one, two = (fleet_of(plan_of(model, {"tensor_parallel_size": ranks})) for ranks in (1, 2))
    apart = fleet_of(plan_of(model, {"tensor_parallel_size": 2, "device": "cpu"}, Machines(1), num_gpus=1))
    assert two.kv_bytes == pytest.approx(one.kv_bytes / 2, rel=0.01)
    assert apart.kv_bytes == pytest.approx(one.kv_bytes, rel=0.01), "each rank is on a node of its own"


@pytest.mark.parametrize("few", [{}, {"max_num_seqs": 4, "max_model_len": 4096}], ids=str)
@pytest.mark.parametrize("share", [0.9, 0.8])
def test_blocks_on_a_gpu_get_what_a_start_would_give_them_beside_the_same_steps(
    share: float, few: dict[str, Any]
) -> None:
    model, machines = str(CONFIGS / "models/qwen3-32b"), Machines(1, 140 * GB)
    engine = {"gpu_memory_utilization": share, **few}
    fleet = fleet_of(plan_of(model, engine, machines))
    driver = 2 << 30
    measured = GpuMemory(total_bytes=140 * GB, used_bytes=fleet.weight_bytes + driver, step_bytes=fleet.step_bytes)
    budget = kv_budget(EngineConfig.from_args({"model": model, **engine}), measured)
    assert budget.num_bytes - fleet.arenas[0].group.blocks.block_bytes < fleet.kv_bytes <= budget.num_bytes
    assert budget.num_bytes == int(share * 140 * GB) - fleet.weight_bytes - driver - fleet.step_bytes


@pytest.mark.parametrize(
    ("engine", "machines", "assumed"),
    [
        ({}, NO_GPUS, "assumed: 17.2 GB of a node's memory are free when weights are loaded"),
        ({"kv_cache_memory_bytes": GB}, NO_GPUS, None),
        ({}, Machines(1), "assumed: the driver takes 2.1 GB of each GPU, and no other process takes any"),
    ],
)
def test_a_plan_tells_the_memory_that_it_assumes_and_a_start_measures(
    engine: dict[str, Any], machines: Machines, assumed: str | None
) -> None:
    told = io.StringIO()
    print_plan(Console(file=told, width=200), "baton", plan_of(str(CONFIGS / "models/qwen3-8b"), engine, machines))
    assert assumed in told.getvalue() if assumed else "assumed" not in told.getvalue()

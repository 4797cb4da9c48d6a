"""Plans agree with engines, as far as can be known without one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from baton.cluster.cli.plan import print_plan
from baton.cluster.contracts import Role
from baton.cluster.planning.fleet_memory import Traffic
from baton.cluster.planning.placement import Machines
from baton.cluster.planning.plan import Plan, make_plan
from baton.cluster.planning.sizing import GB, handoff_bytes
from baton.cluster.spec import load_spec, specs_in_file
from baton.engine.core.config import CacheGroupConfig
from baton.engine.core.kv.block_numbers import BlockNumbers
from baton.engine.core.kv.cache_groups import make_groups
from baton.engine.core.layout import CacheKind, CacheLayout, LayerCache, LayerState, StatePart
from baton.engine.models import load_config
from baton.engine.startup.kv_size import MOST_CACHE_BLOCKS

from ...helpers.baton_command import run_baton
from ...helpers.checkpoints import write_checkpoint

CONFIGS = Path(__file__).parents[3] / "configs"
SERVED = {  # config: (shapes of the model, GPUs per node, GB per GPU, number of nodes)
    "one_gpu": ("qwen3-8b", 1, 80, 1),
    "one_gpu_pair": ("qwen3-8b", 1, 80, 1),
    "one_node_tp8": ("llama-3.3-70b", 8, 80, 1),
    "one_node_tp2": ("qwen3-32b", 8, 80, 1),
    "prefill_decode": ("qwen3-32b", 8, 80, 3),
    "wide_ep": ("deepseek-v3", 8, 141, 2),
    "demo": (None, 0, 80, 1),
    "unified": (None, 0, 80, 1),
    "balanced": (None, 0, 80, 1),
    "autoscaled": (None, 0, 80, 1),
}


@pytest.mark.parametrize("name", SERVED)
def test_every_shipped_config_has_a_plan_without_refusals(name: str) -> None:
    shape, gpus, memory, nodes = SERVED[name]
    model = None if shape is None else str(CONFIGS / "models" / shape)
    (spec,) = specs_in_file(CONFIGS / "serve" / f"{name}.yaml", model=model).values()
    plan = make_plan(spec, Machines(gpus, memory * GB), Traffic())
    assert plan.refusals == []
    assert ["nvidia-cuda-mps-control" in note for note in plan.notes] == [True] * (name == "one_gpu_pair")
    assert plan.num_nodes == nodes
    assert {fleet.role for fleet in plan.fleets} == set(spec.fleets.present)
    assert all(fleet.num_requests(plan.traffic) > 0 for fleet in plan.fleets)


def test_all_shipped_configs_are_tested() -> None:
    assert {file.stem for file in (CONFIGS / "serve").glob("*.yaml")} == set(SERVED)
    assert {shape for shape, *_ in SERVED.values() if shape} == {
        folder.name for folder in (CONFIGS / "models").iterdir() if folder.is_dir()
    }


def plan_of(
    fleets: dict[str, Any], engine: dict[str, Any], machines: Machines, shape: str = "qwen3-32b", **traffic: Any
) -> Plan:
    args = {"model": str(CONFIGS / "models" / shape), "engine": engine, "fleets": fleets}
    return make_plan(load_spec(args), machines, Traffic(**traffic))


ONE_NODE = Machines(8, 80 * GB, nodes=1)
DRAFTING = {"model": str(CONFIGS / "models/qwen3-8b"), "num_speculative_tokens": 3}
DRAFT_TOO_LARGE = "speculative_config.model: the weights of qwen3-8b take 16.4 GB beside the 65.5 GB of the model's"


@pytest.mark.parametrize(
    ("fleets", "engine", "machines", "said"),
    [
        ({"unified": {}}, {"tensor_parallel_size": 3}, ONE_NODE, "num_attention_heads (64)"),
        ({"unified": {}}, {"tensor_parallel_size": 16}, ONE_NODE, "2 nodes needed, 1 given"),
        ({"unified": {"replicas": 9}}, {}, ONE_NODE, "2 nodes needed, 1 given"),
        ({"unified": {}}, {"device": "cuda"}, Machines(0), "a worker needs 1 GPUs, a node has 0"),
        ({"unified": {"num_gpus": 4}}, {}, Machines(2), "a worker needs 4 GPUs, a node has 2"),
        ({"unified": {}}, {}, Machines(8, 40 * GB), "model: its weights take 65.5 GB, and a rank has 36.0 GB"),
        ({"unified": {}}, {"num_gpu_blocks_override": 9}, Machines(8, 60 * GB), "a rank has 60.0 GB for them"),
        ({"unified": {}}, {}, Machines(8, 74 * GB), "gpu_memory_utilization: leaves no room for KV blocks"),
        ({"unified": {}}, {"speculative_config": DRAFTING}, ONE_NODE, DRAFT_TOO_LARGE),
        ({"unified": {}}, {"kv_cache_memory_bytes": 10}, ONE_NODE, "kv_cache_memory_bytes: 10 bytes hold 0"),
        ({"unified": {}}, {"kv_cache_memory_bytes": 10**9, "max_model_len": 20000}, ONE_NODE, "kv_cache_memory_bytes"),
        ({"unified": {}}, {"num_gpu_blocks_override": 100, "max_model_len": 2000}, ONE_NODE, "num_gpu_blocks_override"),
        ({"unified": {}}, {"max_model_len": 50000}, ONE_NODE, "50000"),
        ({"unified": {}}, {"enable_expert_parallel": True}, ONE_NODE, "has no experts"),
    ],
)
def test_a_plan_names_what_would_be_refused(
    fleets: dict[str, Any], engine: dict[str, Any], machines: Machines, said: str
) -> None:
    (refusal,) = plan_of(fleets, engine, machines).refusals
    assert said in refusal


TIERS = {"host_bytes": 100 * GB, "disk_path": "/d", "disk_bytes": 1000 * GB}


def test_tiers_and_buffers_of_a_nodes_workers_are_added_up() -> None:
    args = {
        "model": str(CONFIGS / "models/qwen3-32b"),
        "engine": {"tensor_parallel_size": 2},
        "transfer": {"buffer": "host", "buffer_bytes": 10 * GB},
        "fleets": {"prefill": {"replicas": 2, "kv_tiers": TIERS}, "decode": {}},
    }
    plan = make_plan(load_spec(args), Machines(4, 80 * GB), Traffic())
    assert plan.refusals == []
    assert [(needs.tiers, needs.buffer, needs.model, needs.disk) for needs in plan.hosts] == [
        (400 * GB, 40 * GB, 0, 4000 * GB),
        (0, 20 * GB, 0, 0),
    ]


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        (
            Machines(8, 80 * GB, memory_bytes=300 * GB),
            "node 0: its workers take 400.0 GB of the host's memory (400.0 GB of kv_tiers.host_bytes), it has 300",
        ),
        (
            Machines(8, 80 * GB, disk_bytes=3999 * GB),
            "node 0: its workers take 4000.0 GB of disk (kv_tiers.disk_bytes), it has 3999",
        ),
    ],
)
def test_tiers_larger_than_a_nodes_memory_or_disk_are_refused(machines: Machines, said: str) -> None:
    fleets = {"unified": {"replicas": 2, "engine": {"tensor_parallel_size": 2}, "kv_tiers": TIERS}}
    (refusal,) = plan_of(fleets, {}, machines).refusals
    assert said in refusal


def test_tiers_that_just_fit_are_not_refused() -> None:
    fleets = {"unified": {"engine": {"tensor_parallel_size": 2}, "kv_tiers": TIERS}}
    assert plan_of(fleets, {}, Machines(8, 80 * GB, memory_bytes=200 * GB, disk_bytes=2000 * GB)).refusals == []


def test_a_model_without_a_gpu_counts_as_host_memory() -> None:
    (refusal,) = plan_of({"unified": {}}, {"device": "cpu"}, Machines(0, memory_bytes=30 * GB)).refusals
    assert "GB of models), it has 30" in refusal


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_draft_inputs_of_recurrent_states_are_in_the_plan(device: str) -> None:
    drafts = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}}
    args: dict[str, Any] = {"model": str(CONFIGS / "demo/hybrid"), "fleets": {"unified": {}}}
    plain, drafted = (
        make_plan(load_spec({**args, "engine": {"device": device, "max_num_seqs": 10, **more}}), ONE_NODE, Traffic())
        for more in ({}, drafts)
    )
    assert drafted.refusals == []
    model = load_config(CONFIGS / "demo/hybrid", load_format="dummy")
    (places,) = (layout.block_bytes for layout in model.draft_inputs.values())
    assert drafted.fleets[0].step_bytes - plain.fleets[0].step_bytes >= 10 * 7 * places > 0


def test_experts_that_do_not_divide_are_refused() -> None:
    engine = {"data_parallel_size": 16, "enable_expert_parallel": True, "num_redundant_experts": 3}
    (refusal,) = plan_of({"unified": {}}, engine, Machines(8, 141 * GB), shape="deepseek-v3").refusals
    assert "num_redundant_experts" in refusal


def test_a_default_context_that_does_not_fit_is_reduced() -> None:
    plan = plan_of({"unified": {}}, {"kv_cache_memory_bytes": 10**9}, ONE_NODE)
    assert plan.refusals == []
    assert plan.fleets[0].max_model_len == plan.fleets[0].num_blocks * 16 < 40960
    assert "max_model_len becomes" in plan.notes[0]


def test_a_group_stays_on_one_node_if_possible() -> None:
    plan = plan_of({"unified": {"replicas": 3}}, {"tensor_parallel_size": 4}, Machines(6, 80 * GB))
    nodes = [{rank.node for rank in plan.ranks if rank.group == group} for group in range(3)]
    assert nodes == [{0}, {1}, {2}]
    assert plan.notes == []


def test_an_engine_that_spans_nodes_is_noted() -> None:
    plan = plan_of({"unified": {}}, {"tensor_parallel_size": 8}, Machines(4, 80 * GB))
    assert plan.num_nodes == 2
    assert "over several nodes" in plan.notes[0]


@pytest.mark.parametrize(
    ("transport", "gpus_per_node", "device", "is_noted"),
    [
        ("ucx", 1, "cuda", True),
        ("nixl", 1, "cuda", False),
        ("ucx", 8, "cuda", False),  # all engines are on one node, where CUDA IPC moves the blocks
        ("ucx", 1, "cpu", False),
    ],
)
def test_gpu_memory_that_would_go_through_tcp_is_noted(
    transport: str, gpus_per_node: int, device: str, is_noted: bool
) -> None:
    fleets = {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}}
    args = {"model": str(CONFIGS / "models" / "qwen3-8b"), "fleets": fleets, "transfer": {"transport": transport}}
    plan = make_plan(load_spec(args | {"engine": {"device": device}}), Machines(gpus_per_node, 80 * GB), Traffic())
    assert plan.num_nodes == (1 if gpus_per_node == 8 else 2)
    assert any("through TCP" in note for note in plan.notes) is is_noted


def test_engine_ranks_are_numbered_as_clients_see_them() -> None:
    fleets = {
        "prefill": {"replicas": 2, "engine": {"tensor_parallel_size": 2}},
        "decode": {"engine": {"data_parallel_size": 3}},
    }
    plan = plan_of(fleets, {}, Machines(8, 80 * GB))
    assert [(rank.role, rank.engine_rank, rank.tp_rank) for rank in plan.ranks] == [
        (Role.PREFILL, 0, 0),
        (Role.PREFILL, 0, 1),
        (Role.PREFILL, 1, 0),
        (Role.PREFILL, 1, 1),
        *((Role.DECODE, rank, 0) for rank in (2, 3, 4)),
    ]


@pytest.mark.parametrize(("decode_ranks", "copies"), [(4, 1), (8, 1), (16, 2)])
def test_the_bandwidth_counts_the_parts_that_each_rank_reads(decode_ranks: int, copies: int) -> None:
    fleets = {"prefill": {}, "decode": {"engine": {"tensor_parallel_size": decode_ranks}}}
    plan = plan_of(fleets, {}, Machines(8, 80 * GB), requests_per_s=10.0, prompt_tokens=1000)
    token_bytes = 2 * 64 * 8 * 128 * 2  # keys and values, layers, heads, dimensions, bytes
    assert plan.bandwidth is not None
    assert plan.bandwidth.request == 1008 * token_bytes * copies  # whole blocks of 16
    assert plan.bandwidth.total == 10 * plan.bandwidth.request
    assert plan.bandwidth.decode_rank == plan.bandwidth.total / decode_ranks


def test_every_rank_receives_all_latents() -> None:
    model = load_config(CONFIGS / "models/deepseek-v3", load_format="dummy")
    assert handoff_bytes(model.caches, 4, 1000) == 4 * 1008 * 61 * 576 * 2


def test_a_hand_off_of_windows_and_states_moves_only_what_is_read_later() -> None:
    """Engines hand over the same blocks, which `BlockNumbers` counts."""
    window, state = CacheGroupConfig(num_blocks=9, window=100), CacheGroupConfig(num_blocks=9, checkpoint_tokens=512)
    numbers = BlockNumbers(make_groups([CacheGroupConfig(num_blocks=9), window, state], 16))
    kept = {"num_kv_heads": 1, "head_dim": 1, "dtype": "float8_e4m3fn", "num_planes": 1}
    layers = [
        (LayerCache(kind=CacheKind.FULL, **kept),),
        (LayerCache(kind=CacheKind.WINDOW, window=100, **kept),),
        (LayerState((StatePart((16, 1), "float8_e4m3fn"),)),),
    ]
    caches = CacheLayout.of_layers("m", layers)
    slot = caches.groups[2].blocks.block_bytes
    for num_tokens in (1, 16, 99, 100, 101, 512, 1000):
        expected = (numbers.num_complete(num_tokens, num_tokens) - 1) * 16 + slot
        assert handoff_bytes(caches, 1, num_tokens) == expected


@pytest.mark.parametrize(
    ("engine", "gigabytes"),
    [
        ({"data_parallel_size": 16, "enable_expert_parallel": True}, 61.0),  # 41 GB of them are experts
        ({"tensor_parallel_size": 16}, 43.2),  # each rank has one block of every expert
    ],
)
def test_experts_stay_fp8_if_a_rank_has_whole_blocks(engine: dict[str, Any], gigabytes: float) -> None:
    plan = plan_of({"unified": {}}, engine, Machines(8, 141 * GB), shape="deepseek-v3")
    assert plan.refusals == []
    assert plan.fleets[0].weight_bytes / GB == pytest.approx(gigabytes, rel=0.02)


def test_fp8_weights_are_dequantized_on_gpus_without_fp8() -> None:
    engine = {"data_parallel_size": 16, "enable_expert_parallel": True}
    narrow, wide = (
        plan_of({"unified": {}}, engine, Machines(8, 192 * GB, has_fp8=has_fp8), shape="deepseek-v3")
        .fleets[0]
        .weight_bytes
        for has_fp8 in (True, False)
    )
    assert 1.8 < wide / narrow < 2


def test_the_command_prints_the_plan_and_fails_if_something_is_refused(tmp_path: Path) -> None:
    file = str(CONFIGS / "serve/wide_ep.yaml")
    model = ["--model", str(CONFIGS / "models/deepseek-v3")]
    done = run_baton("plan", file, *model, "--gpu-memory", "141")
    assert done.returncode == 0, done.stderr
    for word in ("8: dp 8-15, tp 0", "Gateways (hybrid): 2", "nothing is handed over"):
        assert word in done.stdout
    for fewer in (("--gpu-memory", "80"), ("--gpu-memory", "141", "--no-fp8")):
        done = run_baton("plan", file, *model, *fewer)
        assert done.returncode == 1, fewer
        assert "refused: unified: gpu_memory_utilization" in done.stdout
        assert "Memory of each worker" not in done.stdout, "the plan must have no fleet left"
        assert "handed over" not in done.stdout, "without a fleet there are no hand-offs, either"
    done = run_baton("plan", file)
    assert done.returncode == 1
    assert "does not hold deepseek-ai/DeepSeek-V3" in done.stderr, "tests are offline, so the model cannot be fetched"


def test_output_to_a_pipe_is_neither_cut_nor_wrapped() -> None:
    done = run_baton("plan", str(CONFIGS / "serve/demo.yaml"), COLUMNS="40")
    lines = done.stdout.splitlines()
    headings = ("weights", "step (estimated)", "KV", "KV blocks", "max_model_len", "requests of an engine")
    assert any(all(heading in line for heading in headings) for line in lines)
    (bandwidth,) = [line for line in lines if line.startswith("At 1 request a second")]
    assert bandwidth.endswith("to each decode worker")


def test_a_plan_is_whole_in_a_narrow_terminal() -> None:
    (spec,) = specs_in_file(CONFIGS / "serve/prefill_decode.yaml", model=str(CONFIGS / "models/qwen3-32b")).values()
    told = io.StringIO()
    print_plan(Console(file=told, width=80), "baton", make_plan(spec, Machines(), Traffic()))
    lines = told.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in told.getvalue(), "nothing is cut"
    (blocks,) = (line for line in lines if "KV blocks" in line)
    assert all(str(fleet.num_blocks) in blocks for fleet in make_plan(spec, Machines(), Traffic()).fleets)


def test_the_plan_prints_its_assumptions_about_nodes() -> None:
    done = run_baton("plan", str(CONFIGS / "serve/prefill_decode.yaml"), "--model", str(CONFIGS / "models/qwen3-32b"))
    assert done.returncode == 0, done.stderr
    assert "8 GPUs of 80 GB, each with enough of decode_node, prefill_node" in done.stdout


def test_check_names_what_it_could_not_check(tmp_path: Path) -> None:
    done = run_baton("check", str(CONFIGS / "serve/one_gpu.yaml"))
    assert done.returncode == 0
    assert "not checked" in done.stdout
    args = {"model": str(CONFIGS / "models/qwen3-8b"), "engine": {"tensor_parallel_size": 3}, "fleets": {"unified": {}}}
    file = tmp_path / "f.yaml"
    file.write_text(yaml.safe_dump(args))
    done = run_baton("check", str(file))
    assert done.returncode == 1
    assert "num_attention_heads (32)" in done.stderr


ON_PREMISES = [file for file in sorted((CONFIGS / "ray").glob("*.yaml")) if "type: local" in file.read_text()]


@pytest.mark.parametrize("file", ON_PREMISES, ids=lambda file: file.stem)
def test_ray_accepts_the_cluster_files(file: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = file.read_text()
    validate_config(prepare_config(yaml.safe_load(text)))
    assert f"ray up configs/ray/{file.name}" in text
    served = [name for name in SERVED if f"configs/serve/{name}.yaml" in text]
    assert served, "the file must name a config to deploy on the cluster"
    _, gpus, _, nodes = SERVED[served[0]]
    config = yaml.safe_load(text)
    assert 1 + config["max_workers"] == nodes
    assert (f"--num-gpus={gpus}" in text) == (gpus > 0)
    for resource in ("prefill_node", "decode_node"):
        asked = any(resource in (CONFIGS / "serve" / f"{name}.yaml").read_text() for name in served)
        assert (resource in text) == asked


def test_layers_with_a_window_have_an_arena_of_their_own_also_with_tiers(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "gpt_oss", "gpt_oss", sliding_window=24, max_position_embeddings=4096)

    def arenas_of(fleets: dict[str, Any], role: str, device: str = "cpu") -> list[tuple[str, int]]:
        engine = {"max_num_seqs": 16, "device": device}
        spec = load_spec({"model": str(model), "fleets": fleets, "engine": engine})
        plan = make_plan(spec, ONE_NODE, Traffic())
        assert plan.refusals == []
        (fleet,) = (fleet for fleet in plan.fleets if fleet.role == role)
        return [(arena.group.kind, arena.num_blocks) for arena in fleet.arenas]

    apart = [("full", 16 * 256), ("window", 256 + 15 * 4)]
    assert arenas_of({"unified": {}}, "unified") == apart
    most = [("full", MOST_CACHE_BLOCKS), ("window", MOST_CACHE_BLOCKS)]
    assert arenas_of({"unified": {}}, "unified", "cuda") == most, "a tiny model has no millions of blocks"
    both = {"prefill": {}, "decode": {}}
    assert arenas_of(both, "prefill") == arenas_of(both, "decode") == apart
    tiers = {"kv_tiers": {"host_bytes": 10**9}}
    assert arenas_of({"unified": tiers}, "unified") == apart
    small = load_spec({"model": str(model), "fleets": {"unified": {"kv_tiers": {"host_bytes": 5000}}}})
    (refusal,) = make_plan(small, ONE_NODE, Traffic()).refusals
    assert "unified: kv_tiers.host_bytes is 5000, which has no block for some cache groups: give at least" in refusal
    one_has_tiers = {"prefill": tiers, "decode": {}}
    assert arenas_of(one_has_tiers, "prefill") == arenas_of(one_has_tiers, "decode") == apart
    done = run_baton("plan", str(CONFIGS / "serve/unified.yaml"), "--model", str(model))
    assert "KV memory of each worker by cache group" in done.stdout
    assert "the last 24 tokens" in done.stdout
    fleet = make_plan(load_spec({"model": str(model), "fleets": {"unified": tiers}}), ONE_NODE, Traffic()).fleets[0]
    in_memory = fleet.tier_slots(10**9)
    bytes_held = [count * arena.group.blocks.block_bytes for count, arena in zip(in_memory, fleet.arenas, strict=True)]
    assert sum(bytes_held) == pytest.approx(10**9, rel=1e-3)
    assert bytes_held[0] / bytes_held[1] == pytest.approx(
        fleet.arenas[0].num_bytes / fleet.arenas[1].num_bytes, rel=1e-3
    )

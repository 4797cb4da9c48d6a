"""Settings that cannot work are refused, with the reason."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cluster.contracts import Role
from baton.cluster.spec import InvalidSpec, load_spec, specs_in_file


def pair(**changes: Any) -> dict[str, Any]:
    return {"fleets": {"prefill": {}, "decode": {}}, **changes}


def test_a_pair_of_fleets_is_an_application(model: str) -> None:
    spec = load_spec(pair(model=model, model_id="m", engine={"max_num_seqs": 8}))
    assert list(spec.fleets.present) == [Role.PREFILL, Role.DECODE]
    assert spec.engine_config(Role.DECODE).max_num_seqs == 8
    assert spec.num_workers == 2
    assert load_spec(spec.model_dump(mode="json", exclude_unset=True)) == spec


def test_a_fleet_overrides_the_arguments_of_all_engines(model: str) -> None:
    fleets = {"prefill": {}, "decode": {"engine": {"max_num_seqs": 4}}}
    spec = load_spec({"model": model, "engine": {"max_num_seqs": 8}, "fleets": fleets})
    assert [spec.engine_config(role).max_num_seqs for role in (Role.PREFILL, Role.DECODE)] == [8, 4]


def test_none_in_a_fleet_means_the_default_and_not_the_common_argument(model: str) -> None:
    fleets = {"prefill": {}, "decode": {"engine": {"max_num_seqs": None, "seed": None}}}
    spec = load_spec({"model": model, "engine": {"max_num_seqs": 8, "seed": None}, "fleets": fleets})
    again = load_spec(spec.model_dump(mode="json", exclude_unset=True))
    for each in (spec, again):
        assert [each.engine_config(role).max_num_seqs for role in (Role.PREFILL, Role.DECODE)] == [8, None]
        assert each.engine_config(Role.DECODE).seed == 0


def test_engine_arguments_that_need_each_other_may_be_given_in_two_places(model: str) -> None:
    """Arguments of the application and of one fleet are merged before they are checked."""
    fleets = {"prefill": {}, "decode": {"engine": {"enable_eplb": True}}}
    spec = load_spec({"model": model, "engine": {"enable_expert_parallel": True}, "fleets": fleets})
    assert spec.engine_config(Role.DECODE).enable_eplb
    with pytest.raises(InvalidSpec, match=r"^engine arguments of decode: enable_eplb: is true, needs enable_expert"):
        load_spec({"model": model, "fleets": fleets})


def test_vllm_arguments_without_effect_are_dropped(model: str) -> None:
    spec = load_spec(pair(model=model, engine={"swap_space": 4, "max_num_seqs": 8}))
    assert spec.engine.model_dump(exclude_unset=True) == {"max_num_seqs": 8}


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ("foo", "must be the origin of web pages as browsers send it, such as https://chat.example"),
        ("", "such as https://chat.example"),
        ("chat.example", "such as https://chat.example"),
        ("localhost:3000", "such as https://chat.example or http://localhost:3000, or '*' for all"),
        ("https://*.example", "such as https://chat.example"),
        ("https://chat.example:port", "such as https://chat.example"),
        ("https://chat.example/", "give 'https://chat.example'"),
        ("https://chat.example/page?x#y", "give 'https://chat.example'"),
        ("https://me@chat.example", "give 'https://chat.example'"),
        ("HTTPS://Chat.Example", "give 'https://chat.example'"),
        ("https://chat.example:443", "give 'https://chat.example'"),
        ("http://[::1]:080/", "give 'http://[::1]'"),
        ("https://b\u00fccher.example", "give 'https://xn--bcher-kva.example'"),
    ],
)
def test_origins_that_no_browser_sends_are_refused(model: str, origin: str, said: str) -> None:
    with pytest.raises(InvalidSpec, match=re.escape(f"gateway.allowed_origins.1: is {origin!r}, ")) as refusal:
        load_spec(pair(model=model, gateway={"allowed_origins": ["*", origin]}))
    assert said in str(refusal.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "fe80::1%eth0", "localhost", "node-3.rack_1.example", "gpu7"])
def test_gateways_may_listen_on_addresses_and_names(model: str, host: str) -> None:
    assert load_spec(pair(model=model, gateway={"host": host})).gateway.host == host


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "https://chat.example", "http://localhost:3000", "http://[::1]:8080", "app://Reader"],
)
def test_origins_that_browsers_send_may_be_allowed(model: str, origin: str) -> None:
    spec = load_spec(pair(model=model, gateway={"allowed_origins": [origin]}))
    assert spec.gateway.allowed_origins == [origin]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fleets": {"prefill": {}}}, "prefill engines need decode engines"),
        ({"fleets": {"decode": {}}}, "decode engines need prefill engines"),
        ({"fleets": {}}, "no fleet"),
        ({"fleets": {"unified": {"replicas": 0}}}, "fleets.unified.replicas"),
        ({"fleets": {"prefil": {}}}, "did you mean 'prefill'?"),
        ({"fleets": {"unified": {"max_replicas": 2}}}, "min_replicas and max_replicas need each other"),
        ({"fleets": {"unified": {"min_replicas": 1, "max_replicas": 2}}}, "add `autoscaling`"),
        ({"autoscaling": {}, "fleets": {"unified": {}}}, "nothing to scale"),
        ({"autoscaling": {"ttft": 1}, "fleets": {"unified": {}}}, "did you mean 'ttft_s'?"),
        (
            {"autoscaling": {}, "fleets": {"unified": {"min_replicas": 3, "max_replicas": 2}}},
            "more than max_replicas, 2",
        ),
        (
            {"autoscaling": {}, "fleets": {"unified": {"min_replicas": 1, "max_replicas": 2, "replicas": 3}}},
            "replicas is 3, which is not from min_replicas, 1, to max_replicas, 2",
        ),
        (
            {
                "autoscaling": {},
                "fleets": {"prefill": {}, "decode": {}, "unified": {"min_replicas": 1, "max_replicas": 2}},
            },
            "if there are prefill and decode engines",
        ),
        (
            {
                "autoscaling": {},
                "load_balancing": "hybrid",
                "fleets": {"unified": {"min_replicas": 0, "max_replicas": 2}},
            },
            "nobody would be there for the first request",
        ),
        ({"gatway": {}}, "did you mean 'gateway'?"),
        *[
            ({"gateway": {"host": host}}, f"gateway.host: is {host!r}, must be an address or a name to listen on")
            for host in (
                "http://localhost",
                "localhost:8000",
                "[::1]",
                " 127.0.0.1",
                "my host",
                "999.1.1.1",
                "a..b",
                "-a",
            )
        ],
        ({"gateway": {"resources": {"GPU": 1}}}, "gateway.resources: has GPU: fleets reserve GPUs, with num_gpus"),
        ({"fleets": {"unified": {"resources": {"CPU": 2}}}}, "fleets.unified.resources: has CPU: give num_cpus"),
        ({"fleets": {"unified": {"resources": {"memory": 2}}}}, "resources: has memory: Ray reserves none for"),
        ({"fleets": {"unified": {"resources": {"": 2}}}}, "resources: has a name that is empty"),
        ({"fleets": {"unified": {"resources": {"a": 1e-5}}}}, "resources.a: is 1e-05, must be 0 or at least 0.0001"),
        ({"fleets": {"unified": {"num_gpus": 1e-9}}}, "num_gpus: is 1e-09, must be 0 or at least 0.0001"),
        ({"fleets": {"unified": {"num_gpus": 1.5}}}, "num_gpus: is 1.5, must be a whole number if it is above 1"),
        ({"fleets": {"unified": {"step_timeout_s": 0.5}}}, "step_timeout_s: is 0.5, must be at least 1"),
        ({"model_id": "a "}, "model_id: is 'a ', must be printable, without blanks at its ends"),
        ({"model_id": "a\nb"}, "model_id: is 'a\\nb', must be printable"),
        ({"model_id": ""}, "model_id: is empty: give the name by which clients ask for the model, or leave it out"),
        ({"revision": ""}, "revision: is '', must have at least 1 character"),
        ({"download_dir": ""}, "download_dir: is '', must have at least 1 character"),
        ({"gateway": {"prot": 1}}, "did you mean 'port'?"),
        ({"gateway": {"port": 70000}}, "gateway.port"),
        ({"gateway": {"gateway_id": "me"}}, "every gateway draws its own"),
        ({"engine": {"max_num_seq": 1}}, "did you mean 'max_num_seqs'?"),
        ({"engine": {"tensor_parallel_size": 0}}, "tensor_parallel_size"),
        (
            {"fleets": {"unified": {"num_gpus": 0.5, "engine": {"data_parallel_size": 2}}}},
            "ranks of one group have a GPU each",
        ),
        ({"load_balancing": "extern"}, "load_balancing"),
        ({"load_balancing": "hybrid", "gateway": {"replicas": 2}}, "one a node"),
        ({"load_balancing": "external", "gateway": {"replicas": 2}}, "one a rank"),
        (
            {"load_balancing": "external", "gateway": {"port": 65535}, "fleets": {"unified": {"replicas": 2}}},
            "ports up to 65536",
        ),
        ({"engine": {"model": "x"}}, "all fleets serve one model"),
        ({"engine": {"tokenizer": "x"}}, "gateways tokenize"),
        ({"engine": {"skip_tokenizer_init": True}}, "load no tokenizer"),
        ({"fleets": {"prefill": {"engine": {"dtype": "float32"}}, "decode": {}}}, "dtype is 'float32' for prefill"),
        ({"fleets": {"prefill": {"engine": {"max_model_len": 64}}, "decode": {}}}, "must be the same in all fleets"),
        ({"transfer": {"lease": 1}}, "did you mean 'lease_s'?"),
        ({"transfer": {"lease_s": -1}}, "transfer.lease_s: is -1, must be above 0"),
        ({"transfer": {"lease_s": "long"}}, "transfer.lease_s: is 'long', must be a number"),
        ({"transfer": {"buffer": "disk"}}, "transfer.buffer: is 'disk'"),
        ({"transfer": {"buffer_bytes": 0}}, "transfer.buffer_bytes: is 0, must be at least 1"),
        ({"fleets": {"unified": {"kv_tiers": {"host_byte": 1}}}}, "did you mean 'host_bytes'?"),
        ({"fleets": {"unified": {"kv_tiers": {}}}}, "give host_bytes, or disk_path and disk_bytes"),
        ({"fleets": {"unified": {"kv_tiers": {"disk_path": "/d"}}}}, "disk_bytes is missing"),
        ({"fleets": {"unified": {"kv_tiers": {"disk_bytes": 1 << 30}}}}, "disk_path is missing"),
        ({"fleets": {"unified": {"kv_tiers": {"host_bytes": 1, "min_tokens": 0}}}}, "min_tokens"),
        (
            {"fleets": {"unified": {"kv_tiers": {"host_bytes": 1 << 30}}}, "engine": {"enable_prefix_caching": False}},
            "found by the prefix cache",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_reason(model: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        load_spec(pair(model=model) | change)
    assert said in str(refusal.value)


def test_a_folder_without_a_model_is_refused_with_the_searched_places(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=str(tmp_path)):
        load_spec(pair(model=str(tmp_path)))


def test_all_problems_are_named_at_once(model: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        load_spec({"model": model, "gateway": {"port": 0}, "fleets": {"prefill": {}}})
    assert len(str(refusal.value).splitlines()) == 2


def test_a_file_may_hold_applications_or_the_arguments_of_one(model: str, tmp_path: Path) -> None:
    args = pair(model=model)
    file = tmp_path / "f.yaml"
    file.write_text(yaml.safe_dump(args))
    assert list(specs_in_file(file)) == ["baton"]
    ours = {"import_path": "baton.cluster.app:build_app", "args": args}
    theirs = {"name": "theirs", "import_path": "other.package:app", "args": {"anything": 1}}
    second = {**ours, "route_prefix": "/b", "args": {**args, "gateway": {"port": 8010}}}
    theirs["route_prefix"] = None
    file.write_text(yaml.safe_dump({"applications": [{"name": "a", **ours}, {"name": "b", **second}, theirs]}))
    assert list(specs_in_file(file)) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("applications: [", "is not valid YAML"),
        ("- model: m", "must hold a mapping"),
        ("applications: [3]", "applications.0: "),
        ("applications: {a: 1}", "applications: "),
        ("applications: [{name: a}]", "applications.0.import_path: "),
        ("applications: [{import_path: 'other.package:app'}]", "none has import_path"),
        ("applications: [{import_path: 'baton.cluster.app:build_app', args: 3}]", "applications.0.args: "),
    ],
)
def test_a_file_that_holds_no_application_is_refused_with_the_place(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(content)
    with pytest.raises(InvalidSpec, match=re.escape(said)):
        specs_in_file(file)


def with_deployments(folder: Path, args: dict[str, Any], *deployments: dict[str, Any]) -> Path:
    """Write a Serve config file with `deployments` beside `args`."""
    ours = {"name": "a", "import_path": "baton.cluster.app:build_app", "args": args, "deployments": list(deployments)}
    file = folder / "f.yaml"
    file.write_text(yaml.safe_dump({"applications": [ours]}))
    return file


def test_num_replicas_under_deployments_sets_the_applications_sizes(model: str, tmp_path: Path) -> None:
    args = pair(model=model, gateway={"port": 9000})
    args["fleets"] = {"prefill": {"num_cpus": 2}, "decode": {"replicas": 2}}
    sizes = ({"name": "decode", "num_replicas": 3}, {"name": "gateway", "num_replicas": 2}, {"name": "prefill"})
    (spec,) = specs_in_file(with_deployments(tmp_path, args, *sizes)).values()
    assert [fleet.replicas for fleet in spec.fleets.present.values()] == [1, 3]
    assert (spec.gateway.replicas, spec.gateway.port) == (2, 9000)
    assert spec.fleets.present[Role.PREFILL].num_cpus == 2


@pytest.mark.parametrize(
    ("deployment", "said"),
    [
        ({"num_replicas": 2}, "deployments.0.name: is missing: one of gateway, prefill, decode"),
        ({"name": "decod", "num_replicas": 2}, "unknown deployment 'decod'; did you mean 'decode'?"),
        ({"name": "unified", "num_replicas": 2}, "unknown deployment 'unified'"),
        ({"name": "decode", "num_replicas": 0}, "num_replicas of decode is 0, must be a whole number, at least 1"),
        ({"name": "decode", "num_replicas": "auto"}, "num_replicas of decode is 'auto', must be"),
        ({"name": "decode", "num_replicas": True}, "num_replicas of decode is True, must be"),
        (
            {"name": "decode", "autoscaling_config": {}},
            "autoscaling_config of decode follows from `args`: give fleets.*",
        ),
        ({"name": "decode", "ray_actor_options": {}}, "give fleets.decode.num_cpus and fleets.decode.resources"),
        ({"name": "gateway", "ray_actor_options": {"num_gpus": 1}}, "num_gpus: may hold num_cpus and resources"),
        ({"name": "gateway", "ray_actor_options": 3}, "3: may hold num_cpus and resources"),
        ({"name": "gateway", "max_ongoing_requests": 3}, "give gateway.max_inflight_requests"),
        (
            {"name": "gateway", "user_config": 3},
            "user_config of gateway must be a mapping with gateway and autoscaling",
        ),
        ({"name": "gateway", "user_config": {"gateway": 3}}, "user_config of gateway: gateway must be a mapping"),
        ({"name": "gateway", "user_config": {"engine": {}}}, "'engine' cannot change while the application runs"),
        ({"name": "gateway", "user_config": {"gateway": {"replicas": 2}}}, "give num_replicas beside it"),
        ({"name": "gateway", "user_config": {"gateway": {"max_surge_percent": 2}}}, "give max_surge_percent beside it"),
        ({"name": "gateway", "user_config": {"gateway": {"num_cpus": 2}}}, "give ray_actor_options.num_cpus beside it"),
        (
            {"name": "gateway", "user_config": {"gateway": {"engine_heartbeat_timeout_s": 2}}},
            "gateway.engine_heartbeat_timeout_s is the engines' setting, too: give it in `args`",
        ),
        (
            {"name": "gateway", "user_config": {"gateway": {"drain_s": -1}}},
            "gateway.drain_s: is -1, must be at least 0",
        ),
        ({"name": "gateway", "user_config": {"gateway": {"max_choice": 1}}}, "did you mean 'max_choices'?"),
        (
            {"name": "decode", "user_config": 1},
            "user_config of decode follows from `args`: only num_replicas may be given",
        ),
    ],
)
def test_deployment_options_that_the_application_would_not_see_are_refused(
    model: str, tmp_path: Path, deployment: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidSpec, match=re.escape(said)):
        specs_in_file(with_deployments(tmp_path, pair(model=model), deployment))


def test_user_config_overrides_the_arguments_of_the_application(model: str, tmp_path: Path) -> None:
    gateway = {"port": 9000, "breaker": {"failures": 9, "open_s": 2.0}, "allowed_origins": ["https://a.example"]}
    args = pair(model=model, gateway=gateway)
    changed = {"breaker": {"open_s": 7.0}, "allowed_origins": [], "max_choices": 3, "port": 9001}
    options = {"ray_actor_options": {"num_cpus": 2, "resources": {"east": 1}}, "max_surge_percent": 50}
    deployment = {"name": "gateway", "user_config": {"gateway": changed}, **options}
    (spec,) = specs_in_file(with_deployments(tmp_path, args, deployment)).values()
    assert (spec.gateway.breaker.failures, spec.gateway.breaker.open_s) == (9, 7.0)
    assert (spec.gateway.allowed_origins, spec.gateway.max_choices, spec.gateway.port) == ([], 3, 9001)
    assert (spec.gateway.num_cpus, spec.gateway.resources, spec.gateway.max_surge_percent) == (2, {"east": 1}, 50)
    beside_ranks = args | {"load_balancing": "hybrid"}
    deployment = {"name": "gateway", "user_config": {"gateway": {"num_cpus": 3}}}
    (spec,) = specs_in_file(with_deployments(tmp_path, beside_ranks, deployment)).values()
    assert spec.gateway.num_cpus == 3


def test_targets_of_the_autoscaler_may_change_while_the_application_runs(model: str, tmp_path: Path) -> None:
    args = {"model": model, "fleets": {"unified": {"min_replicas": 1, "max_replicas": 3}}}
    deployment = {"name": "gateway", "user_config": {"autoscaling": {"ttft_s": 0.2}}}
    file = with_deployments(tmp_path, args | {"autoscaling": {"inter_token_s": 0.1}}, deployment)
    (spec,) = specs_in_file(file).values()
    assert spec.scale_plan is not None
    assert (spec.scale_plan.ttft_s, spec.scale_plan.inter_token_s) == (0.2, 0.1)


def test_a_size_is_given_once_and_not_for_an_autoscaled_fleet(model: str, tmp_path: Path) -> None:
    size = {"name": "decode", "num_replicas": 2}
    with pytest.raises(InvalidSpec, match="'decode' is given twice"):
        specs_in_file(with_deployments(tmp_path, pair(model=model), size, size))
    scaled = {"prefill": {}, "decode": {"min_replicas": 1, "max_replicas": 3}}
    args = {"model": model, "fleets": scaled, "autoscaling": {}}
    with pytest.raises(InvalidSpec, match="num_replicas of decode: the autoscaler decides it"):
        specs_in_file(with_deployments(tmp_path, args, size))


@pytest.mark.parametrize("broken", [{"fleets": 3}, {"gateway": 3}, {"fleets": {"decode": 3, "prefill": {}}}])
def test_with_num_replicas_under_deployments_wrong_arguments_are_still_named(
    model: str, tmp_path: Path, broken: dict[str, Any]
) -> None:
    (where,) = broken
    file = with_deployments(tmp_path, pair(model=model) | broken, {"name": "gateway", "num_replicas": 2})
    with pytest.raises(InvalidSpec, match=f"^{where}"):
        specs_in_file(file)


@pytest.mark.slow
def test_control_plane_processes_import_no_torch_and_engine_processes_no_gateway_routes() -> None:
    code = (
        "import sys, baton.cluster.engines.worker;"
        "print([name for name in ('fastapi', 'torch', 'ray.serve') if name in sys.modules]);"
        "import baton.cluster.app;"
        "print([name for name in ('torch', 'transformers', 'nixl', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]", "[]"]


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[3] / "configs/serve").glob("*.yaml")), ids=lambda f: f.name
)
def test_every_shipped_config_is_valid(file: Path) -> None:
    assert specs_in_file(file, needs_model=False)

"""The options of an application's deployments in Serve: sizes, placement, and time to shut down. Without Ray."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.deployment_state import DeploymentTargetState
from ray.serve._private.version import DeploymentVersion
from ray.serve.schema import ServeApplicationSchema

from baton.cluster.app import build_app
from baton.cluster.contracts import Role
from baton.cluster.engines.group import GroupCannotStart
from baton.cluster.engines.replica import check_gpus
from baton.cluster.gateway.settings import Change, change_of
from baton.cluster.membership.draining import LONGEST_S
from baton.cluster.spec import GatewaySpec, Reservations, load_spec
from baton.kv_transfer.settings import TierSettings

pytestmark = pytest.mark.exhaustive

DEMO = Path(__file__).parents[3] / "configs/demo/model"


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build an application on a cluster with two GPUs; return its deployments by name."""
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})

    def build(**args: Any) -> dict[str, serve.Deployment]:
        root = build_app({"model": str(DEMO), "fleets": {"prefill": {}, "decode": {}}, **args})._bound_deployment
        engines = [engine._bound_deployment for engine in root.init_args[1]]
        return {deployment.name: deployment for deployment in (root, *engines)}

    return build


def shutdown_limit_s(deployment: serve.Deployment) -> float:
    return deployment._deployment_config.graceful_shutdown_timeout_s


def test_serve_ends_no_group_before_its_drain_and_its_disk_tier_are_done(deployed: Any) -> None:
    tiers = {"disk_path": "/tmp/kv", "disk_bytes": 2**30, "host_bytes": 2**40}
    fleets = {"prefill": {"drain_timeout_s": 7.0, "kv_tiers": tiers}, "decode": {"drain_timeout_s": 300.0}}
    parts = deployed(fleets=fleets)
    saving_s = TierSettings(**tiers).save_s
    assert saving_s > 0.0
    assert shutdown_limit_s(parts["prefill"]) > 7.0 + LONGEST_S + saving_s
    assert shutdown_limit_s(parts["decode"]) > 300.0 + LONGEST_S


@pytest.mark.parametrize("mode", ["internal", "hybrid", "external"])
def test_serve_ends_no_gateway_before_its_open_answers(deployed: Any, mode: str) -> None:
    parts = deployed(load_balancing=mode, gateway={"drain_s": 9.0, "drain_timeout_s": 200.0})
    assert shutdown_limit_s(parts["gateway"]) > 209.0


def test_the_settings_limit_how_many_new_replicas_start_beside_old_ones(deployed: Any) -> None:
    parts = deployed(fleets={"prefill": {"max_surge_percent": 50}, "decode": {}}, gateway={"max_surge_percent": 25})
    surges = {name: part._deployment_config.max_surge_percent for name, part in parts.items()}
    assert surges == {"gateway": 25, "prefill": 50, "decode": 0}


def test_a_group_and_its_replica_are_one_placement_group(deployed: Any) -> None:
    fleets = {
        "prefill": {"num_cpus": 0.5, "resources": {"east": 0.001}},
        "decode": {"engine": {"data_parallel_size": 3}},
    }
    parts = deployed(fleets=fleets)
    rank = {"CPU": 0.5, "GPU": 1.0}
    prefill, decode = (parts[name]._replica_config.placement_group_bundles for name in ("prefill", "decode"))
    assert prefill == [{**rank, "east": 0.001, "CPU": 0.6}]
    assert decode == [{**rank, "CPU": 0.6}, rank, rank]
    for name in ("prefill", "decode"):
        assert parts[name].ray_actor_options["num_cpus"] == 0.1
        assert parts[name].init_args[2] | {"CPU": 0.6} == parts[name]._replica_config.placement_group_bundles[0]


def test_all_fleets_use_one_reading_of_the_clusters_resources(deployed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{"CPU": 8.0, "GPU": 2.0}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: next(looks))
    parts = deployed()
    assert [parts[name].init_args[2]["GPU"] for name in ("prefill", "decode")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("gpus", "fleet", "device", "starts"),
    [(2.0, {}, "auto", False), (2.0, {"num_gpus": 0}, "auto", True), (2.0, {}, "cpu", True), (0.0, {}, "auto", True)],
)
def test_an_engine_without_a_reserved_gpu_does_not_start_on_a_node_with_gpus(
    gpus: float, fleet: dict[str, Any], device: str, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application was deployed when the cluster had no GPU, so its bundles reserve none."""
    here = [{"NodeID": "other", "Resources": {"GPU": 8.0}}, {"NodeID": "here", "Resources": {"CPU": 4.0, "GPU": gpus}}]
    monkeypatch.setattr(ray, "nodes", lambda: here)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    spec = load_spec({"model": str(DEMO), "engine": {"device": device}, "fleets": {"unified": fleet}})
    refused = pytest.raises(GroupCannotStart, match=r"fleets\.unified\.num_gpus: 1")
    with contextlib.nullcontext() if starts else refused:
        check_gpus(spec, Role.UNIFIED, Reservations(spec, cluster_gpus=0.0).bundle_of(Role.UNIFIED))


def test_an_autoscaled_fleet_has_its_bounds_and_no_delays_in_serve(deployed: Any) -> None:
    fleets = {"prefill": {"min_replicas": 0, "max_replicas": 3}, "decode": {"replicas": 2}}
    parts = deployed(fleets=fleets, autoscaling={"upscale_delay_s": 5.0})
    scaled = parts["prefill"]._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.initial_replicas, scaled.max_replicas) == (0, 0, 3)
    assert (scaled.upscale_delay_s, scaled.downscale_delay_s) == (0, 0)
    assert parts["decode"]._deployment_config.autoscaling_config is None
    assert parts["decode"].num_replicas == 2


# Another value of each setting of gateways.
OTHER: dict[str, Any] = {
    **{"api_keys": ["other"], "allowed_origins": ["https://other.example"]},
    **dict.fromkeys(("api_keys_file", "host"), "other"),
    **{
        "min_priority": -3,
        "port": 8003,
        "resources": {"other": 1},
        "isolate_keys": True,
        "special_tokens_in_messages": True,
        "page": False,
    },
    **{"queue_limits": {"tokens": 3}, "breaker": {"failures": 3}, "cost": {"handoff_s": 3.0}},
}
ALWAYS = {"api_keys": ["sk"]}  # `isolate_keys` needs a key
INTERNAL_OPTIONS = {
    "replicas": {"num_replicas": 3},
    "max_surge_percent": {"max_surge_percent": 3},
    "num_cpus": {"ray_actor_options": {"num_cpus": 3}},
    "resources": {"ray_actor_options": {"num_cpus": 0.1, "resources": {"other": 1}}},
}
SETTINGS = sorted(GatewaySpec.model_fields.keys() - {"gateway_id"})


def versions(parts: dict[str, serve.Deployment], args: dict[str, Any], *given: Any) -> dict[str, DeploymentVersion]:
    """Return Serve's version of each deployment of an application in a Serve config file."""
    file = {"import_path": "baton.cluster.app:build_app", "args": args, "deployments": list(given)}
    config = ServeApplicationSchema.model_validate(file)
    infos = {
        name: DeploymentInfo(part._deployment_config, part._replica_config, 0, "", version=get_app_code_version(config))
        for name, part in parts.items()
    }
    targets = {
        name: DeploymentTargetState.create(info, 1) for name, info in override_deployment_info(infos, config).items()
    }
    return {name: target.version for name, target in targets.items() if target.version is not None}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["internal", "hybrid"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_changed_setting_of_gateways_restarts_no_engine(deployed: Any, mode: str, name: str) -> None:
    """Serve compares versions: if a version differs, it replaces the replicas or calls their `reconfigure`."""
    change, value = change_of(GatewaySpec, name), OTHER.get(name, 3)
    args = {"load_balancing": mode, "gateway": ALWAYS}
    parts = deployed(**args)
    option = INTERNAL_OPTIONS.get(name) if mode == "internal" else None
    if change is Change.ALL or (change is Change.OPTION and option is None):
        return  # refused under `deployments`: see test_spec.py
    old = versions(parts, args)
    new = versions(parts, args, {"name": "gateway", **(option or {"user_config": {"gateway": {name: value}}})})
    engines = {"prefill", "decode"}
    assert {each: old[each] for each in engines} == {each: new[each] for each in engines}
    replaces_gateways = option is not None and "ray_actor_options" in option
    assert old["gateway"].requires_actor_restart(new["gateway"]) == replaces_gateways
    if option is None:
        assert old["gateway"].requires_actor_reconfigure(new["gateway"])


@pytest.mark.parametrize("name", SETTINGS)
def test_arguments_of_engines_depend_only_on_gateway_settings_that_they_use(deployed: Any, name: str) -> None:
    both = [deployed(gateway=gateway) for gateway in (ALWAYS, ALWAYS | {name: OTHER.get(name, 3)})]
    for role in ("prefill", "decode"):
        old, new = (parts[role].init_args for parts in both)
        assert (old == new) == (change_of(GatewaySpec, name) is not Change.ALL)
        assert "sk" not in str(new), "engines must not get API keys"
    assert both[0]["gateway"].init_args != both[1]["gateway"].init_args


def test_changed_sizes_and_autoscaling_targets_restart_no_replica(deployed: Any) -> None:
    args = {"fleets": {"prefill": {"min_replicas": 1, "max_replicas": 3}, "decode": {}}, "autoscaling": {}}
    parts = deployed(**args)
    targets = {"name": "gateway", "user_config": {"autoscaling": {"ttft_s": 0.2}}}
    old, new = versions(parts, args), versions(parts, args, {"name": "decode", "num_replicas": 3}, targets)
    assert [name for name in parts if old[name].requires_actor_restart(new[name])] == []
    assert old["gateway"].requires_actor_reconfigure(new["gateway"])
    assert deployed(**(args | {"autoscaling": {"ttft_s": 0.2}}))["prefill"].init_args == parts["prefill"].init_args


def test_a_setting_that_is_removed_from_user_config_is_as_in_the_arguments_again(deployed: Any) -> None:
    """Without any `user_config`, Serve would not call `reconfigure`."""
    parts = deployed()
    given = {"name": "gateway", "user_config": {"gateway": {"max_choices": 3}}}
    old, new = versions(parts, {}, given), versions(parts, {})
    assert old["gateway"].requires_actor_reconfigure(new["gateway"])
    assert new["gateway"].deployment_config.user_config == {}

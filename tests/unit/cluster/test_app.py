"""The options of an application's deployments in Serve: sizes, placement, and time to leave. Without Ray."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve

from baton.cluster.app import build_app
from baton.cluster.contracts import Role
from baton.cluster.engines.group import GroupCannotStart
from baton.cluster.engines.replica import check_gpus
from baton.cluster.membership.draining import LONGEST_S
from baton.cluster.spec import load_spec
from baton.kv_transfer.tiers.settings import TierSettings

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


def leaves_within_s(deployment: serve.Deployment) -> float:
    return deployment._deployment_config.graceful_shutdown_timeout_s


def test_serve_ends_no_group_before_its_drain_and_its_disk_tier_are_done(deployed: Any) -> None:
    tiers = {"disk_path": "/tmp/kv", "disk_bytes": 2**30, "host_bytes": 2**40}
    fleets = {"prefill": {"drain_timeout_s": 7.0, "kv_tiers": tiers}, "decode": {"drain_timeout_s": 300.0}}
    parts = deployed(fleets=fleets)
    saving_s = TierSettings(**tiers).save_s
    assert saving_s > 0.0
    assert leaves_within_s(parts["prefill"]) > 7.0 + LONGEST_S + saving_s
    assert leaves_within_s(parts["decode"]) > 300.0 + LONGEST_S


@pytest.mark.parametrize("mode", ["internal", "hybrid", "external"])
def test_serve_ends_no_gateway_before_its_open_answers(deployed: Any, mode: str) -> None:
    parts = deployed(load_balancing=mode, gateway={"drain_s": 9.0, "drain_timeout_s": 200.0})
    assert leaves_within_s(parts["gateway"]) > 209.0


def test_new_versions_start_beside_old_ones_as_far_as_the_settings_say(deployed: Any) -> None:
    parts = deployed(fleets={"prefill": {"max_surge_percent": 50}, "decode": {}}, gateway={"max_surge_percent": 25})
    surges = {name: part._deployment_config.max_surge_percent for name, part in parts.items()}
    assert surges == {"gateway": 25, "prefill": 50, "decode": 0}


def test_a_group_and_what_watches_it_are_one_placement_group(deployed: Any) -> None:
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


def test_all_fleets_are_made_for_the_same_look_at_the_cluster(deployed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{"CPU": 8.0, "GPU": 2.0}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: next(looks))
    parts = deployed()
    assert [parts[name].init_args[2]["GPU"] for name in ("prefill", "decode")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("gpus", "fleet", "device", "starts"),
    [(2.0, {}, "auto", False), (2.0, {"num_gpus": 0}, "auto", True), (2.0, {}, "cpu", True), (0.0, {}, "auto", True)],
)
def test_an_engine_does_not_start_beside_gpus_that_it_would_leave_alone_by_mistake(
    gpus: float, fleet: dict[str, Any], device: str, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application was deployed when the cluster had no GPU."""
    here = [{"NodeID": "other", "Resources": {"GPU": 8.0}}, {"NodeID": "here", "Resources": {"CPU": 4.0, "GPU": gpus}}]
    monkeypatch.setattr(ray, "nodes", lambda: here)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    spec = load_spec({"model": str(DEMO), "engine": {"device": device}, "fleets": {"unified": fleet}})
    refused = pytest.raises(GroupCannotStart, match=r"fleets\.unified\.num_gpus: 1")
    with contextlib.nullcontext() if starts else refused:
        check_gpus(spec, Role.UNIFIED, spec.bundle_of(Role.UNIFIED, cluster_gpus=0.0))


def test_a_fleet_that_is_scaled_has_its_bounds_and_no_delays_but_the_policys(deployed: Any) -> None:
    fleets = {"prefill": {"min_replicas": 0, "max_replicas": 3}, "decode": {"replicas": 2}}
    parts = deployed(fleets=fleets, autoscaling={"upscale_delay_s": 5.0})
    scaled = parts["prefill"]._deployment_config.autoscaling_config
    assert (scaled.min_replicas, scaled.initial_replicas, scaled.max_replicas) == (0, 0, 3)
    assert (scaled.upscale_delay_s, scaled.downscale_delay_s) == (0, 0)
    assert parts["decode"]._deployment_config.autoscaling_config is None
    assert parts["decode"].num_replicas == 2

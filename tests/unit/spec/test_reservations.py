"""The resources that an application reserves from a cluster, and the message if they are missing."""

from __future__ import annotations

from typing import Any

import pytest

from baton.cluster.contracts import Role
from baton.cluster.spec import Reservations, load_spec
from baton.cluster.spec.reservations import num_gpus


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fleet", "device", "cluster_gpus", "expected"),
    [
        ({}, "auto", 0, 0),
        ({}, "auto", 8, 1),
        ({}, "cpu", 8, 0),
        ({"num_gpus": 0.5}, "auto", 8, 0.5),
        ({"num_gpus": 0}, "auto", 8, 0),
    ],
)
def test_an_engine_reserves_a_gpu_if_the_cluster_has_any(
    model: str, fleet: dict[str, Any], device: str, cluster_gpus: float, expected: float
) -> None:
    spec = load_spec({"model": model, "engine": {"device": device}, "fleets": {"unified": fleet}})
    assert Reservations(spec, cluster_gpus).gpus_of(Role.UNIFIED) == expected


def test_engines_for_which_there_are_not_enough_gpus_are_named(model: str) -> None:
    spec = load_spec({"model": model, "fleets": {"prefill": {"replicas": 2}, "decode": {}}})
    assert Reservations(spec, 0).missing_gpus() == ""
    assert Reservations(spec, 3).missing_gpus() == ""
    assert "3 GPUs to reserve for 3 ranks, the cluster has 2" in Reservations(spec, 2).missing_gpus()
    scaled = {"unified": {"min_replicas": 1, "max_replicas": 4}}
    first = load_spec({"model": model, "engine": {"device": "cuda"}, "fleets": scaled, "autoscaling": {}})
    assert Reservations(first, 1).missing_gpus() == ""
    assert "1 GPU to reserve for 1 rank, the cluster has 0" in Reservations(first, 0).missing_gpus()


def test_every_rank_of_every_group_reserves_a_gpu(model: str) -> None:
    fleets = {
        "prefill": {"replicas": 2, "engine": {"tensor_parallel_size": 4}},
        "decode": {"engine": {"data_parallel_size": 3}},
    }
    spec = load_spec({"model": model, "fleets": fleets})
    assert Reservations(spec, 11).missing_gpus() == ""
    assert "11 ranks" in Reservations(spec, 10).missing_gpus()
    assert [spec.num_ranks(role) for role in (Role.PREFILL, Role.DECODE)] == [2, 3]
    assert [spec.first_rank(role) for role in (Role.PREFILL, Role.DECODE)] == [0, 2]


def test_a_fleet_whose_marker_resource_is_on_no_node_is_named(model: str) -> None:
    spec = load_spec({"model": model, "fleets": {"unified": {"resources": {"fast_node": 0.001, "places": 1}}}})
    reserved = Reservations(spec, 0)
    assert reserved.missing_markers({"fast_node": 1.0}) == ""
    assert "fleets.unified.resources: no node has fast_node" in reserved.missing_markers({"CPU": 8.0, "places": 8.0})


def test_the_first_bundle_of_a_group_includes_its_control_plane(model: str) -> None:
    fleets = {
        "prefill": {
            "num_cpus": 0.7,
            "num_gpus": 1,
            "resources": {"east": 0.001},
            "engine": {"tensor_parallel_size": 3},
        },
        "decode": {"num_cpus": 0, "num_gpus": 0},
    }
    spec = load_spec({"model": model, "engine": {"device": "cpu"}, "fleets": fleets})
    rank = {"CPU": 0.7, "GPU": 1.0, "east": 0.001}
    assert Reservations(spec, 8).bundles_of(Role.PREFILL) == [{**rank, "CPU": 0.8}, rank, rank]
    assert Reservations(spec, 8).bundles_of(Role.DECODE) == [{"CPU": 0.101}]


def test_missing_capacity_names_the_resources_that_are_short(model: str) -> None:
    fleets = {"prefill": {"replicas": 2, "num_cpus": 0.9}, "decode": {"num_cpus": 0.9, "resources": {"fast": 1}}}
    spec = load_spec({"model": model, "engine": {"device": "cpu"}, "fleets": fleets})
    reserved = Reservations(spec, 0)
    assert reserved.missing_capacity({"CPU": 3.0, "fast": 1.0}, {"CPU": 4.0, "fast": 1.0}) == ""
    missing = reserved.missing_capacity({"CPU": 2.9}, {"CPU": 4.0})
    assert "no room for all engines: they reserve 3 CPU (free 2.9 of 4), 1 fast (free 0 of 0). Give fewer" in missing
    assert "fast" not in reserved.missing_capacity({"CPU": 2.9, "fast": 2.0}, {"CPU": 4.0, "fast": 2.0})


@pytest.mark.parametrize(("mode", "gateways"), [("internal", 1), ("hybrid", 3), ("external", 6)])
def test_the_number_of_gateways_follows_from_the_mode(model: str, mode: str, gateways: int) -> None:
    fleets = {"prefill": {}, "decode": {"replicas": 2, "engine": {"data_parallel_size": 2}}, "unified": {"replicas": 2}}
    spec = load_spec({"model": model, "load_balancing": mode, "fleets": fleets})
    assert spec.num_gateways(nodes=3) == gateways


def test_an_autoscaled_fleet_has_the_ranks_of_its_largest_size(model: str) -> None:
    fleets = {"prefill": {"min_replicas": 0, "max_replicas": 3}, "decode": {"replicas": 2}}
    spec = load_spec({"model": model, "fleets": fleets, "autoscaling": {"downscale_delay_s": 9}})
    assert [spec.num_ranks(role) for role in (Role.PREFILL, Role.DECODE)] == [3, 2]
    assert [fleet.first_replicas for fleet in spec.fleets.present.values()] == [0, 2]
    plan = spec.scale_plan
    assert plan is not None
    assert {role: (each.min_replicas, each.max_replicas) for role, each in plan.fleets.items()} == {
        Role.PREFILL: (0, 3),
        Role.DECODE: (2, 2),
    }
    assert plan.downscale_to_zero_delay_s == 9
    assert not spec.scales_from_zero, "decode engines can compute the first prompt"
    fleets["decode"] = {"min_replicas": 0, "max_replicas": 2}
    assert load_spec({"model": model, "fleets": fleets, "autoscaling": {}}).scales_from_zero


def test_an_autoscaled_fleet_starts_with_its_replicas(model: str) -> None:
    fleets = {"unified": {"min_replicas": 1, "max_replicas": 3, "replicas": 2}}
    spec = load_spec({"model": model, "fleets": fleets, "autoscaling": {}})
    assert spec.fleets.present[Role.UNIFIED].first_replicas == 2


@pytest.mark.parametrize(
    ("amounts", "needed"),
    [
        ([], 0),
        ([0, 0], 0),
        ([2, 1], 3),
        ([0.5, 0.5], 1),
        ([0.4] * 5, 3),
        ([0.6] * 3, 3),
        ([0.1] * 10, 1),
        ([0.3333] * 3, 1),
        ([0.5, 0.4, 0.6, 0.5], 2),
        ([0.7, 0.5, 0.3, 1], 3),
    ],
)
def test_a_share_of_a_gpu_is_on_a_single_one(amounts: list[float], needed: float) -> None:
    assert num_gpus(amounts) == needed


def test_shares_that_fit_only_in_sum_are_missing_a_gpu(model: str) -> None:
    spec = load_spec({"model": model, "fleets": {"unified": {"replicas": 5, "num_gpus": 0.4}}})
    assert "3 GPUs to reserve for 5 ranks, the cluster has 2" in Reservations(spec, 2).missing_gpus()
    assert Reservations(spec, 3).missing_gpus() == ""

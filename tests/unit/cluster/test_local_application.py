"""`baton serve` reports that it is ready once the gateway routes requests as it will from then on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.cli.local_application import cluster_cpus, is_whole
from baton.cluster.spec import load_spec

PAIR = {"prefill": 1, "decode": 1}
MODEL = Path(__file__).parents[3] / "configs/demo/model"


def engine(rank: int, role: str, *, reachable: bool = True) -> dict[str, Any]:
    return {"rank": rank, "role": role, "reachable": reachable}


def table(*engines: dict[str, Any], own: list[int], others: list[int] | None = None) -> dict[str, Any]:
    gateways = [{"gateway": "a", "ranks": own}, {"gateway": "b", "ranks": others or []}]
    return {"gateway": "a", "gateways": gateways, "data": list(engines)}


def test_an_application_is_ready_when_its_gateway_reaches_both_engines() -> None:
    decode, prefill = engine(0, "decode"), engine(1, "prefill")
    assert is_whole(table(decode, prefill, own=[0, 1]), PAIR)
    assert not is_whole(table(decode, own=[0]), PAIR), "the prefill engine is not listed yet"
    silent = engine(1, "prefill", reachable=False)
    assert not is_whole(table(decode, silent, own=[0, 1]), PAIR), "the gateway cannot use the prefill engine yet"


def test_an_engine_may_be_reached_by_another_gateway_but_must_be_reached_by_one() -> None:
    engines = engine(0, "unified"), engine(1, "unified", reachable=False)
    assert is_whole(table(*engines, own=[0], others=[1]), {"unified": 2})
    assert not is_whole(table(*engines, own=[0], others=[]), {"unified": 2})


def test_a_fleet_that_scales_from_zero_need_not_have_engines() -> None:
    assert is_whole(table(own=[]), {"unified": 0})


@pytest.mark.parametrize(
    ("args", "processes"),
    [
        ({"fleets": {"unified": {}}}, 5),  # a replica, its worker, a gateway, Serve's controller, the directory
        ({"fleets": {"prefill": {}, "decode": {}}, "gateway": {"replicas": 2}}, 8),
        ({"fleets": {"unified": {"engine": {"tensor_parallel_size": 2}}}}, 6),
        ({"fleets": {"unified": {}}, "load_balancing": "external"}, 6),  # and the gateways' controller
        ({"fleets": {"unified": {"min_replicas": 0, "max_replicas": 2}}, "autoscaling": {}}, 3),
    ],
)
def test_ray_starts_as_many_processes_in_advance_as_the_application_has(args: dict[str, Any], processes: int) -> None:
    """Ray starts one process in advance for each CPU that it counts, so the count must not depend on the machine."""
    assert cluster_cpus(load_spec({"model": str(MODEL), **args})) == processes


def test_the_local_cluster_has_the_cpus_that_an_application_reserves() -> None:
    fleets = {"unified": {"num_cpus": 3, "replicas": 4}}
    assert cluster_cpus(load_spec({"model": str(MODEL), "fleets": fleets})) >= 4 * 3

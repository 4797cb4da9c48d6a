"""`baton serve` says that it is ready when requests take the ways that they will take from then on."""

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


def test_an_application_is_whole_when_its_gateway_has_heard_from_both_engines() -> None:
    decode, prefill = engine(0, "decode"), engine(1, "prefill")
    assert is_whole(table(decode, prefill, own=[0, 1]), PAIR)
    assert not is_whole(table(decode, own=[0]), PAIR), "the prefill engine is not listed yet"
    silent = engine(1, "prefill", reachable=False)
    assert not is_whole(table(decode, silent, own=[0, 1]), PAIR), "the gateway would compute the prompt elsewhere"


def test_an_engine_of_another_gateway_need_not_be_reached_but_must_have_one() -> None:
    engines = engine(0, "unified"), engine(1, "unified", reachable=False)
    assert is_whole(table(*engines, own=[0], others=[1]), {"unified": 2})
    assert not is_whole(table(*engines, own=[0], others=[]), {"unified": 2})


def test_engines_that_start_with_the_first_request_are_not_waited_for() -> None:
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
def test_ray_starts_the_processes_ahead_that_an_application_begins_with(args: dict[str, Any], processes: int) -> None:
    """However many cores the machine has: Ray starts as many as it counts CPUs."""
    assert cluster_cpus(load_spec({"model": str(MODEL), **args})) == processes


def test_a_cluster_of_its_own_has_the_cpus_that_an_application_reserves() -> None:
    fleets = {"unified": {"num_cpus": 3, "replicas": 4}}
    assert cluster_cpus(load_spec({"model": str(MODEL), "fleets": fleets})) >= 4 * 3

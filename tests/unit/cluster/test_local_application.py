"""`baton serve` says that it is ready when requests take the ways that they will take from then on."""

from __future__ import annotations

from typing import Any

from baton.cluster.cli.local_application import is_whole

PAIR = {"prefill": 1, "decode": 1}


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

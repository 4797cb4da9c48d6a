"""Trials of slow engines: once a measurement is old, single requests test cheaply if the engine is still slow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.contracts import EngineView, Role
from baton.cluster.gateway.routing.load import Placement
from baton.cluster.gateway.routing.rates import RENEWED_S, CostRates, LearntRates
from baton.cluster.gateway.routing.router import ENGINE_TRIAL_SHARE, MEASURING, Route, Router
from baton.engine.core.messages import EngineRequest
from baton.engine.core.pace import SETTLED, STALE_S, Line, StepTimes
from baton.engine.core.sampling import SamplingParams

from ...helpers.gateway_service import Clock
from .engine_views import view

FAST, SLOW = 1e-4, 1e-3  # seconds to compute a token of a prompt
SHORT = 10  # tokens: such a prompt tries a slow engine as soon as its measurement is stale
LOSS_S = SLOW - FAST  # lost for each token on the slow engine
SLOW_RANK = 2


def engine(rank: int, prefill_s: float = FAST, num_measured: int = 5, step_s: float = 0.01, **more: int) -> EngineView:
    times = StepTimes(Line(0.0, prefill_s), Line(step_s, 1e-5), num_measured, num_measured)
    return view(rank, step_times=times, **more)


class Gateway:
    def __init__(self, clock: Clock, name: str = "g") -> None:
        self.clock, self.sent = clock, 0
        self.rates = LearntRates(CostRates(), clock)
        self.router = Router(
            name, rates=self.rates, session_patience_s=0.0, local_prefill_max_tokens=32768, clock=clock
        )

    def route(self, engines: Sequence[EngineView], num_tokens: int = SHORT) -> Route:
        self.sent += 1
        tokens = [self.sent, *[7] * (num_tokens - 1)]
        request = EngineRequest(request_id=f"r{self.sent}", prompt_token_ids=tokens, sampling=SamplingParams())
        route = self.router.route(engines, self.router.query(request))
        assert route is not None
        return route


class Fleet:
    """Three engines, of which the third measured slow prefills; an engine measures every request that it serves."""

    def __init__(self, num_gateways: int = 1) -> None:
        self.clock = Clock()
        self.gateways = [Gateway(self.clock, f"g{number}") for number in range(num_gateways)]
        self.num_measured, self.token_s = 5, SLOW

    @property
    def engines(self) -> list[EngineView]:
        return [engine(0), engine(1), engine(SLOW_RANK, self.token_s, self.num_measured)]

    def ask(self, num_tokens: int = SHORT, gateway: int = 0) -> bool:
        """Serve a request. Returns whether the slow engine did."""
        route = self.gateways[gateway].route(self.engines, num_tokens)
        is_tried = route.placement.engine.rank == SLOW_RANK
        self.num_measured += is_tried
        return is_tried

    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds


def begun(num_gateways: int = 1) -> Fleet:
    fleet = Fleet(num_gateways)
    assert not any(fleet.ask(gateway=number) for number in range(num_gateways))
    return fleet


def test_a_slow_engine_is_tried_once_its_measurement_is_stale() -> None:
    fleet = begun()
    fleet.wait(STALE_S)
    assert not fleet.ask()
    fleet.wait(RENEWED_S)
    route = fleet.gateways[0].route(fleet.engines)
    assert (route.placement.engine.rank, route.reason) == (SLOW_RANK, MEASURING)


def test_after_a_few_slow_trials_the_engine_gets_no_more_for_a_while() -> None:
    fleet = begun()
    fleet.wait(STALE_S + RENEWED_S)
    assert [fleet.ask() for _ in range(SETTLED + 5)] == [True] * SETTLED + [False] * 5
    fleet.wait(STALE_S)
    assert not fleet.ask()
    fleet.wait(RENEWED_S)
    assert fleet.ask()


def test_an_engine_that_is_fast_again_gets_its_share_after_one_trial() -> None:
    fleet = begun()
    fleet.wait(STALE_S + RENEWED_S)
    assert fleet.ask()
    fleet.token_s = FAST
    fleet.wait(RENEWED_S)
    assert 15 <= sum(fleet.ask(1000) for _ in range(90)) <= 45


def test_a_trial_is_a_single_request() -> None:
    fleet = begun()
    gateway = fleet.gateways[0]
    fleet.wait(STALE_S + RENEWED_S)
    first = gateway.route(fleet.engines)
    gateway.router.loads.sent(first.placement)
    assert gateway.route(fleet.engines).placement.engine.rank != SLOW_RANK
    others = [*fleet.engines[:2], engine(SLOW_RANK, SLOW, num_waiting_tokens=1, num_requests_waiting=1)]
    fresh = begun()
    fresh.wait(STALE_S + RENEWED_S)
    assert fresh.gateways[0].route(others).placement.engine.rank != SLOW_RANK, "another gateway runs a trial"


def test_a_longer_prompt_tries_a_slow_engine_later() -> None:
    num_tokens = 2000
    for share, is_tried in ((0.9, False), (1.1, True)):
        fleet = begun()
        fleet.wait(share * num_tokens * LOSS_S / ENGINE_TRIAL_SHARE)
        assert fleet.ask(num_tokens) is is_tried


def test_engines_of_similar_or_higher_speed_are_not_tried() -> None:
    fleet = begun()
    for fleet.token_s in (1.3 * FAST, FAST / 10):
        fleet.wait(10 * STALE_S)
        assert fleet.gateways[0].route(fleet.engines, 1000).reason != MEASURING


def test_an_engine_without_room_is_not_tried() -> None:
    fleet = begun()
    fleet.wait(10 * STALE_S)
    full = [*fleet.engines[:2], engine(SLOW_RANK, SLOW, num_blocks_free=0)]
    assert fleet.gateways[0].route(full).placement.engine.rank != SLOW_RANK


def test_trials_of_one_gateway_count_for_all() -> None:
    fleet = begun(num_gateways=3)
    fleet.wait(STALE_S + RENEWED_S)
    assert [fleet.ask(gateway=number % 3) for number in range(9)] == [True] * SETTLED + [False] * 6


def test_a_new_gateway_knows_the_slow_engine_and_tries_it_later() -> None:
    fleet = begun()
    fleet.wait(STALE_S + RENEWED_S)
    late = Gateway(fleet.clock)
    assert late.route(fleet.engines, 1000).placement.engine.rank != SLOW_RANK
    fleet.wait(STALE_S + RENEWED_S)
    assert late.route(fleet.engines).placement.engine.rank == SLOW_RANK


def test_a_decode_engine_whose_steps_were_slow_is_tried_by_one_answer() -> None:
    clock = Clock()
    gateway, source = Gateway(clock), view(0, Role.PREFILL)

    def decoders(num_measured: int) -> list[EngineView]:
        measured = [(1, 0.001, 5), (2, 0.001, 5), (SLOW_RANK + 1, 0.002, num_measured)]
        return [
            view(rank, Role.DECODE, step_times=StepTimes(None, Line(step_s, 1e-5), 0, number))
            for rank, step_s, number in measured
        ]

    def chosen(engines: Sequence[EngineView]) -> Placement:
        request = EngineRequest(request_id="r", prompt_token_ids=[7] * SHORT, sampling=SamplingParams())
        gateway.rates.renew(engines)
        placement = gateway.router.decode_placement(engines, gateway.router.query(request), source.record)
        assert placement is not None
        return placement

    loss_s = 0.001 * CostRates().answer_tokens
    assert chosen(decoders(5)).engine.rank != SLOW_RANK + 1
    clock.now_s += 0.9 * loss_s / ENGINE_TRIAL_SHARE
    assert chosen(decoders(5)).engine.rank != SLOW_RANK + 1
    clock.now_s += 0.2 * loss_s / ENGINE_TRIAL_SHARE
    tried = chosen(decoders(5))
    assert tried.engine.rank == SLOW_RANK + 1
    gateway.router.loads.sent(tried)
    assert chosen(decoders(5)).engine.rank != SLOW_RANK + 1, "one at a time"
    gateway.router.loads.ended(tried)
    assert chosen(decoders(5 + SETTLED)).engine.rank != SLOW_RANK + 1


def test_a_unified_engine_whose_steps_were_slow_is_tried_by_one_request() -> None:
    gateway = Gateway(Clock())

    def engines(**more: int) -> list[EngineView]:
        return [engine(0, step_s=0.001), engine(1, step_s=0.001), engine(SLOW_RANK, step_s=0.002, **more)]

    loss_s = 0.001 * CostRates().answer_tokens
    assert gateway.route(engines()).placement.engine.rank != SLOW_RANK
    gateway.clock.now_s += 1.1 * loss_s / ENGINE_TRIAL_SHARE
    assert gateway.route(engines(num_requests_running=1)).placement.engine.rank != SLOW_RANK
    gateway = Gateway(Clock())
    assert gateway.route(engines()).placement.engine.rank != SLOW_RANK
    gateway.clock.now_s += 1.1 * loss_s / ENGINE_TRIAL_SHARE
    route = gateway.route(engines())
    assert (route.placement.engine.rank, route.reason) == (SLOW_RANK, MEASURING)


arrivals = st.lists(st.tuples(st.floats(0.01, 200.0), st.integers(2, 4000)), min_size=1, max_size=80)


@given(arrivals, st.integers(1, 3))
def test_trials_of_an_engine_that_stays_slow_cost_no_more_than_the_stated_share(
    requests: list[tuple[float, int]], num_gateways: int
) -> None:
    fleet, lost_s = begun(num_gateways), 0.0
    for number, (pause_s, num_tokens) in enumerate(requests):
        fleet.wait(pause_s)
        lost_s += num_tokens * LOSS_S * fleet.ask(num_tokens, number % num_gateways)
    assert lost_s <= SETTLED * ENGINE_TRIAL_SHARE * fleet.clock.now_s + 1e-9


@given(st.lists(st.tuples(st.floats(0.01, 20.0), st.integers(2, 1000)), min_size=1, max_size=200))
def test_the_first_trial_of_a_slow_engine_comes_within_the_stated_time(requests: list[tuple[float, int]]) -> None:
    """The first request whose expected loss is below the stated share of the elapsed time is the trial."""
    fleet = begun()
    fleet.token_s, began_s = SLOW, fleet.clock.now_s
    for pause_s, num_tokens in requests:
        fleet.wait(pause_s)
        stale_s = fleet.clock.now_s - began_s
        if stale_s > max(STALE_S + RENEWED_S, num_tokens * LOSS_S / ENGINE_TRIAL_SHARE):
            assert fleet.ask(num_tokens)
            break
        if fleet.ask(num_tokens):
            assert stale_s > STALE_S
            break


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True), min_size=1, max_size=40))
def test_measurements_are_kept_only_of_engines_seen_lately(fleets: list[list[int]]) -> None:
    gateway = Gateway(Clock())
    for ranks in fleets:
        gateway.route([engine(rank) for rank in ranks])
        gateway.clock.now_s += STALE_S + RENEWED_S
    newest = [engine(rank) for rank in fleets[-1]]
    gateway.route(newest)
    assert gateway.rates.known <= {each.record.engine_id for each in newest}


def test_pinned_requests_do_not_change_the_age_of_other_measurements() -> None:
    fleet = begun()
    gateway = fleet.gateways[0]
    for _ in range(5):
        fleet.wait(0.19 * STALE_S)
        gateway.route(fleet.engines[:1])
    fleet.wait(0.1 * STALE_S)
    assert fleet.ask()


@pytest.mark.parametrize("num_new", range(1, SETTLED))
def test_an_unfinished_series_of_trials_ages_from_its_first(num_new: int) -> None:
    fleet = begun()
    fleet.wait(STALE_S + RENEWED_S)
    assert all(fleet.ask() for _ in range(num_new))
    fleet.wait(STALE_S - RENEWED_S)
    assert fleet.ask(), "the series of trials must go on"
    fleet = begun()
    fleet.wait(10 * STALE_S)
    assert all(fleet.ask(1000) for _ in range(num_new))
    assert not fleet.ask(4000), "this prompt is too long to be a trial"
    fleet.wait(STALE_S + RENEWED_S)
    assert not fleet.ask(1000), "this prompt loses too much for a measurement that is a minute old"
    assert fleet.ask()
    assert not fleet.ask(4000)
    assert not fleet.ask(1000), "the next series must not make the measurement older"

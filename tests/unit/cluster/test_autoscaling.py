"""The autoscaler's measurements and decisions. Without Ray."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from baton.cluster.autoscaling.load_samples import (
    FIRST_TOKEN_S,
    CounterSums,
    FleetLoad,
    GatewayLoad,
    LoadReports,
    Sample,
    bucket_of,
    percentile,
)
from baton.cluster.autoscaling.policy import Moment, decide, desired_sizes
from baton.cluster.autoscaling.scaler import FleetTarget, Scaler
from baton.cluster.contracts import Bounds, EngineGroup, EnginePulse
from baton.cluster.gateway.metrics import GatewayMetrics

from ...helpers.fakes import CountingEngine, make_record
from .engine_groups import group_of
from .scaling_samples import PLAN, D, P, U


def samples(
    seconds: int = 11,
    *,
    prompt_tokens: float = 0.0,
    reads_per_s: float = 1000.0,
    answer_tokens: float = 0.0,
    first_token_s: float = 0.1,
    serving: int = 1,
    batches: tuple[int, ...] = (1,),
    step_s: float = 0.01,
    row_s: float = 0.0,
    begin_s: float = 0.0,
    waiting: int = 0,
    used_blocks: int = 0,
) -> list[Sample]:
    """Return samples of a steady load: ten requests and so many tokens a second, on groups of a known speed."""
    first = [0.0] * (len(FIRST_TOKEN_S) + 1)
    at, taken, gateways, prefill, decode = begin_s, [], GatewayLoad(inflight=1), FleetLoad(), FleetLoad()
    for second in range(seconds):
        batch = batches[second % len(batches)]
        steps = answer_tokens / batch
        prefill = FleetLoad(
            serving,
            prefill.busy_s + prompt_tokens / reads_per_s,
            prefill.prompt_tokens + prompt_tokens,
            waiting=waiting,
        )
        decode = FleetLoad(
            serving,
            decode.busy_s + steps * (step_s + batch * row_s),
            generation_tokens=decode.generation_tokens + answer_tokens,
            steps=decode.steps + steps,
            live=batch,
            used_blocks=used_blocks,
            blocks_of_a_group=100,
        )
        first[bucket_of(FIRST_TOKEN_S, first_token_s)] += 10
        gateways = GatewayLoad(
            requests=gateways.requests + 10,
            prompt_tokens=gateways.prompt_tokens + prompt_tokens,
            generation_tokens=gateways.generation_tokens + answer_tokens,
            first_token=tuple(first),
            inflight=1,
        )
        taken.append(Sample(at, gateways, {P: prefill, D: decode}))
        at += 1.0
    return taken


# ---- desired sizes ----


@pytest.mark.parametrize(("prompt_tokens", "groups"), [(100, 1), (500, 1), (1000, 2), (2400, 5), (99_999, 8)])
def test_prefill_groups_follow_the_prompts_and_what_a_busy_group_reads(prompt_tokens: float, groups: int) -> None:
    assert desired_sizes(samples(prompt_tokens=prompt_tokens), PLAN)[P] == groups


def test_a_gap_in_the_samples_is_bridged() -> None:
    """After its process was stopped, or its machine was busy, the directory must still decide at once."""
    steady = samples(prompt_tokens=1000)
    assert desired_sizes([*steady[:4], steady[-1]], PLAN)[P] == 2
    assert desired_sizes([steady[0], steady[-1]], PLAN)[P] == 2


def test_waiting_prompts_raise_the_desired_size() -> None:
    assert desired_sizes(samples(prompt_tokens=500, waiting=100), PLAN)[P] == 2


def test_cached_tokens_do_not_count_as_work() -> None:
    loads = samples(prompt_tokens=1000)
    half = [
        dataclasses.replace(
            each,
            fleets={
                **each.fleets,
                P: dataclasses.replace(
                    each.fleet(P),
                    prompt_tokens=each.fleet(P).prompt_tokens / 2,
                    cached_tokens=each.fleet(P).prompt_tokens / 2,
                ),
            },
        )
        for each in loads
    ]
    assert desired_sizes(loads, PLAN)[P] == desired_sizes(half, PLAN)[P], "half of the tokens take the same busy time"


@pytest.mark.parametrize(("first_token_s", "groups"), [(0.9, 2), (1.6, 4), (100.0, 4)])
def test_a_missed_target_at_most_doubles_the_desired_size(first_token_s: float, groups: int) -> None:
    loads = samples(prompt_tokens=900, first_token_s=first_token_s, serving=2)
    assert desired_sizes(loads, PLAN)[P] == groups


def test_a_target_missed_by_long_prompts_on_idle_engines_does_not_scale_up() -> None:
    assert desired_sizes(samples(prompt_tokens=100, first_token_s=5.0, serving=2), PLAN)[P] == 1


def test_a_target_missed_with_fewer_groups_does_not_count_after_scaling_up() -> None:
    before = samples(8, prompt_tokens=900, first_token_s=100.0, serving=1)
    after = samples(11, prompt_tokens=900, first_token_s=100.0, serving=1)[8:]
    grown = [
        dataclasses.replace(
            each,
            gateways=msgspec.structs.replace(each.gateways, first_token=before[-1].gateways.first_token),
            fleets={role: dataclasses.replace(fleet, serving=2) for role, fleet in each.fleets.items()},
        )
        for each in after
    ]
    assert desired_sizes(before, PLAN)[P] == 2
    assert desired_sizes([*before, *grown], PLAN)[P] == 2


def test_decode_groups_follow_the_steps_that_the_target_allows() -> None:
    """A step takes 5 ms plus 1 ms a request, and may take 25 ms: so 20 requests, or 800 tokens a second, per group."""
    wish = desired_sizes(samples(answer_tokens=2000, batches=(10, 20), step_s=0.005, row_s=0.001, serving=4), PLAN)
    assert wish[D] == 3


def test_steps_of_one_measured_size_are_not_extrapolated() -> None:
    """Only batches of ten were measured, ten tokens in 15 ms: so 667 tokens a second per group."""
    wish = desired_sizes(samples(answer_tokens=2000, batches=(10,), step_s=0.005, row_s=0.001, serving=4), PLAN)
    assert wish[D] == 3
    one = desired_sizes(samples(answer_tokens=50, batches=(1,), step_s=0.005, row_s=0.001), PLAN)
    assert one[D] == 1


def test_decode_groups_follow_arriving_requests_even_if_prefill_falls_behind() -> None:
    """A group could write 800 tokens a second and writes 700; then the rate of arriving requests grows sixfold."""
    steady = samples(answer_tokens=700, batches=(16,), step_s=0.02, serving=2)
    more = [
        dataclasses.replace(
            each, gateways=msgspec.structs.replace(each.gateways, requests=each.gateways.requests + new)
        )
        for each, new in zip(steady, [0] * 6 + [50, 100, 150, 200, 250], strict=True)
    ]
    assert desired_sizes(steady, PLAN)[D] == 1
    assert desired_sizes(more, PLAN)[D] == 2


@pytest.mark.parametrize("answer_tokens", [1, 1000])
def test_decode_groups_follow_the_present_answers_however_long_those_of_the_past_were(answer_tokens: int) -> None:
    now = samples(answer_tokens=200, batches=(8, 16), row_s=0.001)
    past = GatewayLoad(requests=1e6, generation_tokens=1e6 * answer_tokens)
    changed = [
        dataclasses.replace(
            each,
            gateways=msgspec.structs.replace(
                each.gateways,
                requests=each.gateways.requests + past.requests,
                generation_tokens=each.gateways.generation_tokens + past.generation_tokens,
            ),
        )
        for each in now
    ]
    assert desired_sizes(changed, PLAN)[D] == desired_sizes(now, PLAN)[D]


def test_full_kv_caches_raise_the_desired_size_at_any_load() -> None:
    assert desired_sizes(samples(answer_tokens=10, used_blocks=300), PLAN)[D] == 4


@pytest.mark.parametrize("tokens", [0, 1, 10])
def test_a_trickle_of_work_that_shows_no_speed_keeps_one_group(tokens: float) -> None:
    """A fleet that has served much load would otherwise keep its size as long as requests come now and then."""

    def trickle(waiting: int) -> list[Sample]:
        return samples(prompt_tokens=tokens, answer_tokens=tokens / 10, serving=4, waiting=waiting)

    assert desired_sizes(trickle(waiting=0), PLAN) == {P: 1, D: 1}
    assert desired_sizes(trickle(waiting=1), PLAN)[P] == 4, "work that waits may be more than one group's"


def test_without_measurements_there_is_no_desired_size() -> None:
    assert desired_sizes(samples(2), PLAN) == {}


# ---- hysteresis ----


def moments(desired: list[int], begin_s: float = 0.0) -> list[Moment]:
    at = Sample(0.0, GatewayLoad(inflight=1))
    return [
        Moment(dataclasses.replace(at, at_s=begin_s + second), {P: wish, D: 1}) for second, wish in enumerate(desired)
    ]


def decided(desired: list[int], current: int) -> int:
    return decide(moments(desired), PLAN, len(desired) - 1.0, {P: current, D: 1})[P]


def test_a_fleet_grows_once_more_were_wanted_for_long_enough() -> None:
    assert decided([1] * 10 + [3] * 4, 1) == 1
    assert decided([1] * 10 + [5, 3, 4, 4, 5], 1) == 3, "the smallest size that was wanted"
    assert decided([3] * 4, 1) == 1, "the samples do not cover the delay"


def test_a_fleet_shrinks_once_fewer_were_wanted_for_long_enough() -> None:
    assert decided([4] * 10 + [1] * 20, 4) == 4
    assert decided([4] * 10 + [1, 2] * 11, 4) == 2, "the largest size that was wanted"


def test_an_alternating_desired_size_changes_nothing() -> None:
    assert decided([2, 3] * 40, 3) == 3
    assert decided([2, 3] * 40, 2) == 2


# ---- scaling to and from zero ----


ZERO = msgspec.structs.replace(PLAN, fleets={P: Bounds(0, 8), D: Bounds(0, 8)})


def test_the_first_request_starts_one_group_of_each_fleet_at_once() -> None:
    waits = Moment(Sample(5.0, GatewayLoad(requests=1, inflight=1, unplaced=1)), {})
    assert decide([waits], ZERO, 5.0, {P: 0, D: 0}) == {P: 1, D: 1}


def quiet(seconds: int) -> list[Moment]:
    return [Moment(Sample(float(second), GatewayLoad(requests=7)), {P: 1, D: 1}) for second in range(seconds)]


def test_an_idle_application_scales_to_its_minimum_and_stays_there() -> None:
    assert decide(quiet(30), ZERO, 29.0, {P: 2, D: 1}) != {P: 0, D: 0}
    assert decide(quiet(31), ZERO, 30.0, {P: 2, D: 1}) == {P: 0, D: 0}
    assert decide(quiet(31), PLAN, 30.0, {P: 2, D: 1}) == {P: 1, D: 1}
    assert decide(quiet(31), ZERO, 30.0, {P: 0, D: 0}) == {P: 0, D: 0}
    assert decide(quiet(6), ZERO, 5.0, {P: 0, D: 0}) == {P: 0, D: 0}, "a new directory must start no group"


def test_an_answer_that_is_still_being_written_keeps_its_engines() -> None:
    asked = quiet(20)
    asked[10] = Moment(Sample(10.0, GatewayLoad(requests=7, inflight=1)), {P: 1, D: 1})
    assert decide([*asked, *quiet(31)[20:]], ZERO, 30.0, {P: 1, D: 1}) == {P: 1, D: 1}


# ---- measurements ----


def test_sums_of_counters_never_fall_when_processes_start_and_end() -> None:
    meter = CounterSums()
    for process, value in (("a", 5.0), ("b", 2.0), ("a", 7.0), ("a", 1.0)):
        meter.add("kind", process, (value,))
    assert meter.total("kind", 1) == (3.0,), "2 before the restart of process a, and 1 after it"
    meter.keep(["b"])
    meter.add("kind", "b", (3.0,))
    assert meter.total("kind", 1) == (4.0,)


def test_totals_of_a_gateway_that_reconnects_do_not_count_as_new_requests() -> None:
    """After a lost connection, or to a new directory, totals must not count as a burst that scales fleets up."""
    old = GatewayLoad(requests=1e6, prompt_tokens=1e9, generation_tokens=1e8)
    scaler, idle = Scaler(PLAN), CountingEngine().stats()
    engines = {role: make_record(engine_id=role, role=role) for role in (P, D)}
    groups = [EngineGroup(group_id=role, first_rank=0, engines=[engine]) for role, engine in engines.items()]
    scaler.start_from({P: 1, D: 1})
    for second in range(30):
        if second:  # the new directory first decides without any report
            scaler.update_gateway("g", old)
        work = {"prompt_tokens": 1000 * second, "generation_tokens": 1000 * second, "num_steps": second}
        pulse = EnginePulse(0.0, 0, 0, 0, float(second), msgspec.structs.replace(idle, **work))
        for group in groups:
            scaler.update_group(group, [pulse])
        scaler.update(float(second), [] if second == 15 else ["g"], groups)  # later the gateway is out of reach once
        assert [scaler.wanted(role) for role in (P, D)] == [FleetTarget(1, []), FleetTarget(1, [])]


def test_a_percentile_lies_within_its_bucket() -> None:
    assert percentile((1.0, 2.0, 4.0), (0, 10, 0, 0), 0.5) == 1.5
    assert percentile((1.0, 2.0, 4.0), (5, 0, 0, 5), 0.9) == 4.0
    assert percentile((1.0, 2.0, 4.0), (0, 0, 0, 0), 0.9) == 0.0


def test_a_sample_sums_the_listed_groups() -> None:
    loads = LoadReports()
    for name, busy in (("a", 0.0), ("b", 5.0), ("a", 1.0), ("b", 7.0)):
        loads.update_group(group_of(name, size=1), [EnginePulse(0.0, 3, 1, 0, busy)])
    assert loads.num_live("a") == 4
    groups = [group_of("a", size=1), group_of("b", size=1).with_draining(True)]
    fleet = loads.sample(1.0, [], groups).fleet(U)
    assert (fleet.serving, fleet.busy_s) == (1, 3.0)
    assert loads.sample(2.0, [], []).fleet(U).busy_s == 3.0, "the sum must not fall when groups leave"


def test_an_engine_is_as_full_as_the_cache_group_that_has_the_fewest_blocks_left() -> None:
    loads, group = LoadReports(), group_of("a", size=1)
    stats = msgspec.structs.replace(CountingEngine().stats(), num_blocks=200, num_blocks_free=150, kv_usage=0.95)
    loads.update_group(group, [EnginePulse(0.0, 3, 1, 0, 0.0, stats)])
    fleet = loads.sample(1.0, [], [group]).fleet(U)
    assert (fleet.used_blocks, fleet.blocks_of_a_group) == (190, 200)


def test_a_gateway_reports_what_its_histograms_counted() -> None:
    metrics = GatewayMetrics("m", list)
    metrics.requests.inc(3)
    metrics.prompt_tokens.inc(40)
    metrics.unplaced.inc()
    for seconds in (0.3, 0.4, 1000.0):
        metrics.first_token_s.observe(seconds)
    load = metrics.load()
    assert (load.requests, load.prompt_tokens, load.unplaced) == (3, 40, 1)
    expected = [0.0] * (len(FIRST_TOKEN_S) + 1)
    expected[bucket_of(FIRST_TOKEN_S, 0.3)] += 2
    expected[-1] += 1
    assert list(load.first_token) == expected
    assert sum(load.inter_token) == 0

"""Times of work are estimated from measurements."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.pace import NEWEST, SETTLED, STALE_S, Line, LineFit, StepMeter


def fitted(*measured: tuple[int, float], times: int = 1) -> LineFit:
    fit = LineFit()
    for number, (units, seconds) in enumerate(measured * times):
        fit.add(units, seconds, float(number))
    return fit


def at(fit: LineFit, units: int) -> float:
    line = fit.line()
    assert line is not None
    return line.at(units)


def test_nothing_is_known_before_the_first_measurement() -> None:
    assert fitted().line() is None
    assert fitted((5, 0.0)).line() is None, "less than the clock can tell"


@pytest.mark.parametrize(("base_s", "unit_s"), [(0.003, 1e-6), (0.0, 2e-5), (0.5, 0.0)])
def test_a_line_is_found_again(base_s: float, unit_s: float) -> None:
    fit, sizes = LineFit(), random.Random(0)
    for number in range(200):
        units = sizes.randint(1, 10_000)
        fit.add(units, base_s + unit_s * units, number / 10)
    for units in (10, 1000, 8000, 50_000):
        assert at(fit, units) == pytest.approx(base_s + unit_s * units, rel=0.15)


def test_of_one_size_the_time_is_taken_to_grow_with_it() -> None:
    assert at(fitted((100, 0.2)), 1000) == pytest.approx(2.0)


def test_one_outlier_changes_nothing() -> None:
    fit = fitted((100, 0.1), times=20)
    fit.add(100, 60.0, 21.0)
    assert at(fit, 100) == pytest.approx(0.1, rel=0.5)
    for number in range(5):
        fit.add(100, 0.1, 22.0 + number)
    assert at(fit, 100) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("factor", [300.0, 1 / 300])
def test_a_lasting_change_is_known_after_a_few_measurements_whatever_the_sizes(factor: float) -> None:
    fit, sizes = LineFit(), random.Random(0)
    for number in range(200):
        units = sizes.randint(10, 1000)
        fit.add(units, 0.001 * units, number / 10)
    for number in range(NEWEST // 2 + 1):
        units = sizes.randint(10, 1000)
        fit.add(units, factor * 0.001 * units, 21 + number)
    assert at(fit, 500) == pytest.approx(factor * 0.5, rel=0.5)


def test_a_faster_measurement_outvotes_stale_ones_at_once_and_a_slower_one_does_not() -> None:
    for factor, is_believed in ((0.1, True), (10.0, False)):
        fit = fitted((100, 1.0), times=20)
        fit.add(100, factor, 19.0 + STALE_S - NEWEST)
        assert at(fit, 100) == pytest.approx(1.0, rel=0.5), "the others are as fresh"
        fit = fitted((100, 1.0), times=20)
        fit.add(100, factor, 20.0 + STALE_S)
        assert at(fit, 100) == pytest.approx(factor if is_believed else 1.0, rel=0.01)
        assert fit.newest_s == (factor if is_believed else 1.0)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_few_fresh_measurements_outvote_stale_ones(factor: float) -> None:
    fit = fitted((100, 1.0), times=20)
    for number in range(SETTLED):
        fit.add(100, factor, 3600.0 + number)
    assert at(fit, 100) == pytest.approx(factor)
    fit.add(100, 100 * factor, 3603.0)
    assert at(fit, 100) == pytest.approx(factor), "one outlier changes nothing"


def test_what_was_measured_long_ago_counts_for_less() -> None:
    fit = LineFit()
    for number in range(20):
        fit.add(1000, 1.0, float(number))
    for number in range(20):
        fit.add(100, 0.2, 3600.0 + number)
    assert at(fit, 100) == pytest.approx(0.2, rel=0.01)


def test_what_one_more_request_adds_stays_known_while_only_single_requests_run() -> None:
    fit = LineFit()
    for units in (1, 8, 64):
        fit.add(units, 0.005 + 4e-5 * units, 0.0)
    for minute in range(0, 24 * 60, 10):
        fit.add(1, 0.005 + 4e-5, 60.0 * minute)
        line = fit.line()
        assert line is not None
        assert line.unit_s == pytest.approx(4e-5, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e3)), min_size=1, max_size=60))
def test_no_time_is_negative_and_memory_is_bounded(measured: list[tuple[int, float]]) -> None:
    fit = fitted(*measured)
    line = fit.line()
    assert line is not None
    assert line.base_s >= 0
    assert line.unit_s >= 0
    assert line.at(1) > 0
    assert fit.num_points <= 20


def steps(meter: StepMeter, *sizes: tuple[int, int], depth: int = 1, began: float = 0.0) -> float:
    """Meter steps of 10 ms, plus 1 ms for each token or request, one after the other; return the last one's end."""
    for number, (tokens, decodes) in enumerate(sizes):
        meter.planned(number, began if depth == 1 else began - 0.005)
        began += 0.01 + 0.001 * (tokens + decodes)
        meter.settled(number, tokens, decodes, began)
    return began


@pytest.mark.parametrize("depth", [1, 2])
def test_the_steps_of_an_engine_are_measured_from_the_end_of_the_one_before(depth: int) -> None:
    meter = StepMeter()
    decoded = steps(meter, *((0, count) for count in (1, 4, 16, 64) * 10), depth=depth)
    steps(meter, *((count, 8) for count in (128, 512, 2048) * 10), depth=depth, began=decoded)
    times = meter.times()
    assert (times.num_prefills, times.num_decodes) == (30, 40)
    assert times.decode == Line(pytest.approx(0.01, rel=0.1), pytest.approx(0.001, rel=0.1))
    assert times.prefill is not None
    assert times.prefill.at(1000) == pytest.approx(1.01, rel=0.05), "without the requests that decoded beside it"


def test_what_one_more_request_adds_is_not_known_where_all_batches_had_one_size() -> None:
    meter = StepMeter()
    steps(meter, *[(0, 4)] * 30)
    assert meter.times().decode == Line(pytest.approx(0.014), 0.0)
    assert meter.times().prefill is None


def test_one_slow_prompt_says_nothing_of_an_engine_that_has_read_no_other() -> None:
    """Routers would avoid the engine, and it could never show that it is faster."""
    meter = StepMeter()
    end = steps(meter, (128, 0), (128, 0))
    assert meter.times().prefill is None
    steps(meter, (128, 0), (128, 0), began=end)
    assert meter.times().prefill is not None


def test_steps_that_were_lost_are_no_measurement() -> None:
    meter = StepMeter()
    meter.planned(0, 0.0)
    meter.forget()
    meter.planned(1, 100.0)
    meter.settled(1, 0, 1, 100.5)
    assert meter.times().decode == Line(pytest.approx(0.5), 0.0)

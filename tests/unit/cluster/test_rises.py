"""Increases of `/metrics` counters between polls."""

from __future__ import annotations

import math

import pytest

from baton.cluster.cli.top import Rises, bucket_quantile, gauge, samples_of

TEXT = """# TYPE baton_answers counter
baton_answers_total{{route="/a",status="200"}} {a}
baton_answers_total{{route="/b",status="500"}} {b}
# TYPE baton_first histogram
baton_first_bucket{{le="0.1"}} {low}
baton_first_bucket{{le="0.2"}} {high}
baton_first_bucket{{le="+Inf"}} {high}
# TYPE baton_leases gauge
baton_leases{{engine="e"}} 3
"""


def text(a: int = 0, b: int = 0, low: int = 0, high: int = 0) -> str:
    return TEXT.format(a=a, b=b, low=low, high=high)


def test_the_first_poll_is_the_baseline_and_a_restarted_process_begins_at_zero() -> None:
    rises = Rises(60.0)
    rises.add(100.0, samples_of(text(a=50, b=3)))
    assert rises.sum("baton_answers_total") == 0
    assert rises.rate("baton_answers_total") is None
    rises.add(102.0, samples_of(text(a=60, b=3)))
    rises.add(104.0, samples_of(text(a=4, b=4)))
    assert rises.by("baton_answers_total", lambda labels: labels["route"]) == {"/a": 14, "/b": 1}
    assert rises.sum("baton_answers_total", lambda labels: labels["status"] == "500") == 1
    assert rises.rate("baton_answers_total") == pytest.approx(15 / 4)


def test_polls_outside_the_window_are_forgotten() -> None:
    rises = Rises(10.0)
    for at_s, count in ((0, 0), (5, 10), (14, 11), (16, 12)):
        rises.add(at_s, samples_of(text(a=count)))
    assert rises.sum("baton_answers_total") == 2


def test_quantiles_count_only_new_observations() -> None:
    rises = Rises(60.0)
    rises.add(0.0, samples_of(text(low=1000, high=1000)))
    assert rises.quantile("baton_first", 0.5) is None
    rises.add(1.0, samples_of(text(low=1000, high=1010)))
    assert rises.quantile("baton_first", 0.5) == pytest.approx(0.15)


def test_a_quantile_above_all_bounds_is_the_highest_bound() -> None:
    assert bucket_quantile({0.1: 0, 0.2: 1, math.inf: 10}, 0.99) == 0.2
    assert bucket_quantile({}, 0.5) is bucket_quantile({0.1: 0, math.inf: 0}, 0.5) is None


def test_gauges_are_summed_over_series_with_a_label() -> None:
    assert gauge(samples_of(text()), "baton_leases", "engine", "e") == 3
    assert gauge(samples_of(text()), "baton_leases", "engine", "other") is None

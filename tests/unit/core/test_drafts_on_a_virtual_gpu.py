"""Drafts in a whole engine core, on a GPU whose steps take the time of a formula: their gains and costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .virtual_gpu import HEAD, MODEL, QUICK_MODEL, Times, times_without

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
@pytest.mark.parametrize("min_tokens", [0, 256])
@pytest.mark.parametrize(("num_requests", "times"), [(1, 2.2), (8, 2.2), (64, 1.7)])
def test_a_head_gains_what_its_guesses_are_worth(num_requests: int, times: float, min_tokens: int) -> None:
    *_, third = times_without(HEAD, [256] * num_requests, 3, min_tokens=min_tokens)
    assert third > times


@pytest.mark.parametrize(
    ("length", "times", "rate"),
    [
        (256, MODEL, 0.9),
        (256, QUICK_MODEL, 0.97),
        (256, replace(MODEL, captures_reads=False), 0.9),
        (2000, MODEL, 0.9),
    ],
    ids=["short", "quick guesses", "reads launched slowly", "long"],
)
def test_a_draft_model_that_is_not_worth_its_time_costs_little(length: int, times: Times, rate: float) -> None:
    """Each burst begins with new tries, so short ones lose most."""
    rates = times_without(times, [length] * 256, 2, rate=rate)
    assert min(rates) > (0.965 if length < 1000 else 0.98)


def test_no_guesses_are_made_where_a_step_has_no_room_for_drafts() -> None:
    (rate,) = times_without(QUICK_MODEL, [256] * 512)
    assert rate > 0.999


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_requests", "times"), [(8, 1.45), (64, 1.12)])
def test_a_draft_model_gains_where_it_is_worth_its_time(num_requests: int, times: float) -> None:
    *_, third = times_without(MODEL, [256] * num_requests, 3)
    assert third > times


def test_a_draft_model_gains_again_when_the_load_has_fallen() -> None:
    """Before that, it was not worth its time, and left many tokens unread."""
    first, second = times_without(MODEL, [200] * 192 + [1500] * 64, 2)
    assert first > 1.04
    assert second > 1.08

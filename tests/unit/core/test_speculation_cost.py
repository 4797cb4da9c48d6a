"""The cost of drafts is measured, and figures that one delayed step made wrong do not last."""

from __future__ import annotations

import random

import pytest

from baton.engine.core.speculation.step_cost import StepCost


def test_the_cost_of_a_draft_is_found() -> None:
    cost, draw = StepCost(), random.Random(0)
    for _ in range(4):
        cost.note_plain(8, 0.010)
    assert cost.plain_s(8) == pytest.approx(0.010)
    assert cost.plain_s(9) is None
    assert cost.added_s(16, 0.002) == 0.002, "not known"
    for _ in range(60):
        drafts = draw.choice([8, 16, 32])
        cost.note_drafts(8, drafts, 0.010 + 0.0001 * drafts, 0.010)
    for tokens in (12, 16, 20, 24, 30, 40, 100):
        assert cost.added_s(tokens, 0.002) == pytest.approx(0.0001, rel=0.05)
    assert cost.added_s(1000, 0.002) == 0.002, "too far from what was measured"


def test_the_time_without_drafts_is_known_from_the_second_step_on_for_some_hundred_steps() -> None:
    cost = StepCost()
    cost.note_plain(8, 0.010)
    assert cost.plain_s(8) is None, "one step may have been delayed"
    cost.note_plain(8, 0.010)
    assert cost.plain_s(8) == pytest.approx(0.010)
    for _ in range(400):
        cost.note_plain(64, 0.050)
    assert cost.plain_s(8) == pytest.approx(0.010)
    for _ in range(400):
        cost.note_plain(64, 0.050)
    assert cost.plain_s(8) is None, "sequences have become longer"
    for _ in range(2):
        cost.note_plain(8, 0.020)
    assert cost.plain_s(8) == pytest.approx(0.020)


def test_between_two_numbers_of_requests_the_time_without_drafts_is_estimated() -> None:
    cost = StepCost()
    for _ in range(2):
        cost.note_plain(8, 0.010)
        cost.note_plain(64, 0.024)
    assert cost.plain_s(36) == pytest.approx(0.017)
    assert (cost.num_plain(8), cost.num_plain(36)) == (2, 0)
    assert cost.plain_s(128) is None
    assert cost.plain_s(4) is None
    for _ in range(2):
        cost.note_plain(36, 0.015)
    assert cost.plain_s(36) == pytest.approx(0.015), "a measurement counts more"


def test_one_delayed_step_hardly_changes_the_time_without_drafts() -> None:
    cost = StepCost()
    for seconds in (0.010, 0.010, 0.010, 0.010, 5.0):
        cost.note_plain(8, seconds)
    assert cost.plain_s(8) == pytest.approx(0.012)


def test_a_single_draft_among_many_requests_weighs_little() -> None:
    cost = StepCost()
    cost.note_drafts(100, 1, 0.200, 0.100)
    assert cost.added_s(101, 0.001) == pytest.approx(0.001 + 0.01 * (0.100 - 0.001))


@pytest.mark.parametrize("measured_again", [False, True])
def test_what_a_draft_adds_is_forgotten_unless_it_is_measured_again(measured_again: bool) -> None:
    cost = StepCost()
    for step in range(1600):
        if step == 0 or (measured_again and step % 100 == 0):
            cost.note_drafts(8, 8, 0.011, 0.010)
        else:
            cost.note_plain(8, 0.010)
    assert cost.added_s(16, 0.002) == pytest.approx(0.001 / 8 if measured_again else 0.002)


def test_a_few_normal_measurements_of_guesses_correct_a_delayed_one() -> None:
    cost = StepCost()
    cost.note_guesses(8, num_guesses=1, seconds=0.020)
    for _ in range(3):
        cost.note_guesses(8, num_guesses=1, seconds=0.0005)
    assert cost.guess_s(8) < 0.020 / 6

"""Phases of a start-up add up to the whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from baton.engine.startup.phases import Phases


def ticking() -> Callable[[], float]:
    """Return a clock that advances by a second each time it is read."""
    return itertools.count().__next__


def test_time_belongs_to_the_innermost_phase() -> None:
    phases = Phases(ticking())
    with phases("outer"):
        with phases("inner"):
            pass
        with phases("other"):
            pass
    assert phases.seconds == {"outer": 3, "inner": 1, "other": 1}
    assert phases.total == 5
    assert str(phases) == "outer 3.00, inner 1.00, other 1.00"


def test_time_between_phases_belongs_to_none_and_a_phase_that_comes_again_adds_up() -> None:
    phases = Phases(ticking())
    for _ in range(2):
        with phases("one"):
            pass
    assert phases.seconds == {"one": 2}


def test_a_phase_that_fails_has_ended() -> None:
    phases = Phases(ticking())
    with phases("outer"), pytest.raises(ZeroDivisionError), phases("inner"):
        raise ZeroDivisionError
    assert phases.seconds == {"outer": 2, "inner": 1}

"""The order of faults, and the summary's figures: without hosts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .fault_trial import Verdict, summary
from .faults import all_faults
from .load import Fate
from .schedule import make_schedule

NAMES = [fault.name for fault in all_faults(seed=1)]


def test_the_same_seed_gives_the_same_faults_and_another_seed_gives_others() -> None:
    assert make_schedule(7, 50, NAMES) == make_schedule(7, 50, NAMES)
    assert make_schedule(7, 50, NAMES) != make_schedule(8, 50, NAMES)


def test_a_longer_schedule_begins_like_a_shorter_one() -> None:
    assert make_schedule(7, 50, NAMES)[:20] == make_schedule(7, 20, NAMES)


def test_every_fault_comes_once_before_any_comes_again() -> None:
    assert len(set(NAMES)) == len(NAMES)
    first_round = [planned.fault for planned in make_schedule(3, len(NAMES), NAMES)]
    assert sorted(first_round) == sorted(NAMES)


def test_the_last_line_adds_up_what_the_faults_did() -> None:
    verdicts = [
        verdict(Counter({Fate.RIGHT: 10, Fate.LOST: 2}), recovery_s=3.0, decisions=Counter({0.01: 2, 1.75: 1})),
        verdict(Counter({Fate.RIGHT: 5, Fate.WRONG: 1}), recovery_s=9.0, problems=("one answer was wrong",)),
    ]
    line = summary(verdicts)
    assert line.startswith("chaos: faults=2 requests=18 right=15 wrong=1 refused=0 lost=2 hung=0 resumed=2 ")
    assert "decisions=3 decision_p50_s<=0.01 decision_max_s<=1.75 pause_max_s=0.7 " in line
    assert line.endswith("answered_p50_s=0.5 answered_max_s=0.5 recovery_p50_s=6.0 recovery_max_s=9.0 failed=1")


def verdict(fates: Counter[Fate], **figures: Any) -> Verdict:
    figures = {"recovery_s": 1.0, "decisions": Counter(), "problems": ()} | figures
    return Verdict(fault="a", fates=fates, answered_s=0.5, longest_s=1.0, pause_s=0.7, resumed=1, **figures)

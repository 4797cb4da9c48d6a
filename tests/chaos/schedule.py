"""The faults of a run and their order, determined by a seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PAUSE_S = (0.0, 5.0)  # at random, between a fault's recovery and the next fault


@dataclass(frozen=True)
class Planned:
    number: int
    pause_s: float
    fault: str


def make_schedule(seed: int, count: int, faults: Sequence[str]) -> list[Planned]:
    """Return `count` faults in rounds: each round has every fault once, in a random order.

    So the first entries of a longer schedule are the shorter schedule.
    """
    rng = random.Random(seed)
    names: list[str] = []
    planned = []
    for number in range(count):
        if not names:
            names = rng.sample(list(faults), len(faults))
        planned.append(Planned(number, round(rng.uniform(*PAUSE_S), 1), names.pop()))
    return planned

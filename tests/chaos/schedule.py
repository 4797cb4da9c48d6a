"""The faults of a run and their order, as a function of a seed and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

PAUSE_S = (0.0, 5.0)  # between what was healed and what comes next, at random


@dataclass(frozen=True)
class Planned:
    number: int
    pause_s: float
    fault: str


def make_schedule(seed: int, count: int, faults: Sequence[str]) -> list[Planned]:
    """`count` faults. All of them come before any comes again, each round in an order of its own; so the first entries
    of a longer schedule are a shorter one.
    """
    rng = random.Random(seed)
    names: list[str] = []
    planned = []
    for number in range(count):
        if not names:
            names = rng.sample(list(faults), len(faults))
        planned.append(Planned(number, round(rng.uniform(*PAUSE_S), 1), names.pop()))
    return planned

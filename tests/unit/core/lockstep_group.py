"""Ranks in threads that step together over fakes."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.core.step import Chunk, StepPlan


def plan(*lens: int, step: int = 0) -> StepPlan:
    return StepPlan(step, [], [], [Chunk(row, 0, length, True, []) for row, length in enumerate(lens)])


def never(values: Sequence[int]) -> list[int]:
    raise AssertionError("nobody is to be asked")

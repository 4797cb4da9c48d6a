"""Steps that are planned and have no result yet, oldest first: results come in the order of plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ..requests.request import Request
from ..step import StepPlan, StepResult
from .draft import StepDraft


class _Step(NamedTuple):
    plan: StepPlan
    requests: Sequence[Request]  # of each of its chunks
    num_prompt_tokens: int


class StepMismatch(Exception):
    """A result does not fit the oldest step in flight: the runner broke the contract of `step.py`."""


class StepsInFlight:
    def __init__(self, max_num_tokens: int) -> None:
        self.num_planned = 0  # ever; also the number of the next one
        self._max_num_tokens = max_num_tokens
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_prompt_tokens(self) -> int:
        """What they compute of prompts."""
        return sum(step.num_prompt_tokens for step in self._steps)

    def draft(self) -> StepDraft:
        return StepDraft(self.num_planned, self._max_num_tokens)

    def enter(self, draft: StepDraft, freed_rows: list[int], *, constrained: bool) -> StepPlan:
        """The draft becomes a plan, and is on its way. `constrained`: some of its requests may have a grammar."""
        plan, requests = draft.seal(freed_rows, constrained=constrained)
        self._steps.append(_Step(plan, requests, draft.num_prompt_tokens))
        self.num_planned += 1
        return plan

    def take(self, result: StepResult) -> tuple[StepPlan, Sequence[Request]]:
        """The oldest, whose result this is. Raises `StepMismatch`."""
        if self._steps:
            plan, requests, _ = self._steps.popleft()
            if result.step == plan.step and len(result.chunks) == len(requests):
                return plan, requests
            expected = f"step {plan.step} with {len(requests)} chunks"
        else:
            expected = "none"
        raise StepMismatch(f"got a result of step {result.step} with {len(result.chunks)} chunks, expected {expected}")

    def forget(self) -> None:
        """No result will come."""
        self._steps.clear()

"""Data-parallel ranks of a mixture of experts step together, or not at all.

Experts are spread over the ranks, so a rank that runs a step needs all the others to run one. Each rank plans for
itself; before each step, the ranks agree in one small all-reduce on what each of them runs:

    idle ── it has a plan (and wakes the others), or is woken by one of them ──> running
    running:  plan, agree ─┬─ some rank has a plan ──> all run a step; ranks without a plan run an empty one
                           ├─ none has, but one waits for results ──> no step; agree again
                           └─ neither ──> idle, until the next wave

A *wave* is the time between two idle periods. A wake-up message carries the number of its wave. If that wave has ended,
the message is dropped; if this rank has not reached the wave yet, it is kept, since its sender has already seen the end
of the present one. So no wake-up is lost, and none starts a rank while the others are idle.

A rank whose requests all wait for something else (a KV transfer, a full pool) does not keep the wave alive: it begins
another wave when they can continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from .step import PADDING, GroupStep, StepPlan, StepSize

EMPTY_STEP = -1  # the number of a step that a rank runs without a plan of its own

_FIELDS = len(StepSize.__struct_fields__)


class Lockstep:
    """One rank's side. The thread that owns the `EngineCore` makes all calls, except `on_wake`: one other thread.

    `agree` returns the element-wise maximum of all ranks' integers, once all have called it; it raises if a rank is
    gone. `wake_others` sends a wave's number to all other ranks and does not wait. Every `review_experts_every`
    steps (0: never), plans ask the ranks to review the placement of experts.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        agree: Callable[[Sequence[int]], list[int]],
        wake_others: Callable[[int], None],
        *,
        review_experts_every: int = 0,
    ) -> None:
        self.wave = 0
        self.num_steps = 0  # steps of the group, empty ones included: the same number on every rank that is running
        self._rank = rank
        self._num_ranks = num_ranks
        self._agree = agree
        self._wake_others = wake_others
        self._review_experts_every = review_experts_every
        self._newest_wake = -1
        self._when_woken: Callable[[], None] | None = None
        self._running = False

    def on_wake(self, wave: int) -> None:
        """Note that another rank has begun a wave."""
        self._newest_wake = max(self._newest_wake, wave)
        if self._when_woken is not None:
            self._when_woken()

    def when_woken(self, call: Callable[[], None]) -> None:
        """Have `call` called after each `on_wake`, on the thread of that call, from now on."""
        self._when_woken = call

    @property
    def is_running(self) -> bool:
        """Return whether the other ranks wait for this one: then it must `join`, with or without a plan."""
        return self._running or self._newest_wake >= self.wave

    def join(self, plan: StepPlan | None, *, has_pending: bool) -> StepPlan | None:
        """Return the plan that this rank must launch: its own, an empty one, or None.

        `has_pending`: this rank waits for results, which may lead to another plan. Raises what `agree` raises.
        """
        proposal = self.propose(plan, has_pending=has_pending)
        return None if proposal is None else self.decide(plan, self._agree(proposal))

    def propose(self, plan: StepPlan | None, *, has_pending: bool) -> list[int] | None:
        """Return this rank's integers for the agreement; None if it is idle and stays so."""
        if plan is not None and not self.is_running:
            self._wake_others(self.wave)
        self._running = plan is not None or self.is_running
        if not self._running:
            return None
        proposal = [0] * (1 + _FIELDS * self._num_ranks)
        proposal[0] = int(has_pending)
        if plan is not None:
            first = 1 + _FIELDS * self._rank
            proposal[first : first + _FIELDS] = [int(value) for value in msgspec.structs.astuple(plan.size)]
        return proposal

    def decide(self, plan: StepPlan | None, agreed: Sequence[int]) -> StepPlan | None:
        """Return the plan to launch, or None, given the element-wise maximum of all ranks' proposals."""
        of_ranks = [agreed[first : first + _FIELDS] for first in range(1, len(agreed), _FIELDS)]
        if any(map(any, of_ranks)):
            return self._of_group(plan, [_size(values) if any(values) else PADDING for values in of_ranks])
        if not agreed[0]:
            self._running = False
            self.wave += 1
        return None

    def _of_group(self, plan: StepPlan | None, sizes: list[StepSize]) -> StepPlan:
        self.num_steps += 1
        reviews = bool(self._review_experts_every) and self.num_steps % self._review_experts_every == 0
        group = GroupStep(sizes, reviews)
        if plan is None:
            return StepPlan(EMPTY_STEP, [], [], [], group)
        return msgspec.structs.replace(plan, group=group)


def _size(values: Sequence[int]) -> StepSize:
    num_tokens, num_seqs, num_wanted, all_hidden, *drafts = values
    return StepSize(num_tokens, num_seqs, num_wanted, bool(all_hidden), *drafts)

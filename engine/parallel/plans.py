"""Transport of step plans from the rank that schedules to the ranks that follow.

    EngineCore ──StepPlan──> LeadingRunner ─┬─> its own runner
                                            ├──Mesh──> follow_plans: another rank's runner
                                            └──Mesh──> ...

A plan is sent as it is, since it has differences only. Nothing comes back: sampled tokens are equal on all ranks, and
for a rank that is slower, the others wait in the next step's first collective.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from ..core.step import PendingStep, Runner, StepPlan, StepResult
from .groups import GroupFailed, ParallelGroups
from .member import Member
from .mesh import Mesh
from .rendezvous import RendezvousClient

_NAME = "plans"


class PlanSender:
    """The sending side, on the rank that schedules."""

    def __init__(self, member: Member, rendezvous: RendezvousClient, groups: ParallelGroups) -> None:
        """Connect all followers. Raises `GroupFailed`."""
        self._mesh = Mesh(_NAME, member, rendezvous, groups, member.tp_ranks[1:], grace_s=0.0)
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def loss(self) -> str | None:
        """The name of a follower that has gone; None while none has."""
        return self._mesh.loss

    def send(self, plan: StepPlan) -> None:
        """Send a plan without waiting. Raises `GroupFailed` if a follower has gone."""
        self._mesh.send(self._encode(plan))

    def check(self) -> None:
        """Raise `GroupFailed` if a follower has gone."""
        self._mesh.check()

    def close(self, *, orderly: bool = True) -> None:
        """Close the connections. With `orderly`, tell the followers first; else they notice a loss."""
        self._mesh.close(orderly=orderly)


class PlanReceiver:
    """The receiving side, on a rank that follows."""

    def __init__(self, member: Member, rendezvous: RendezvousClient, groups: ParallelGroups) -> None:
        """Connect to the rank that schedules. Raises `GroupFailed` if there is none."""
        self._leader = member.tp_ranks[0]
        self._mesh = Mesh(_NAME, member, rendezvous, groups, [self._leader])
        self._decode = msgspec.msgpack.Decoder(StepPlan).decode

    def receive(self) -> StepPlan | None:
        """Wait for the next plan, without polling. None: there are no more. Raises `GroupFailed` without a leader."""
        message = self._mesh.receive()
        if message is None:
            return None
        try:
            return self._decode(message)
        except msgspec.DecodeError as error:
            raise GroupFailed(f"rank {self._leader} sent a plan that cannot be read: {error}") from error

    def close(self) -> None:
        """Close the connection. If the leader has not ended yet, it notices a loss."""
        self._mesh.close(orderly=False)


class LeadingRunner:
    """The runner of the rank that schedules; followers run the same steps. Implements `core.step.Runner`."""

    def __init__(self, runner: Runner, sender: PlanSender) -> None:
        self._runner = runner
        self._sender = sender

    def launch(self, plan: StepPlan) -> PendingStep:
        """Send the plan to the followers, and launch it here. Raises `GroupFailed` once a follower has gone."""
        self._sender.send(plan)
        try:
            return _LeadingStep(self._runner.launch(plan), self._sender)
        except RuntimeError as error:
            raise _cause(self._sender, error) from error


class _LeadingStep:
    def __init__(self, step: PendingStep, sender: PlanSender) -> None:
        self._step = step
        self._sender = sender

    def result(self) -> StepResult:
        """Return the result. Raises `GroupFailed` if a follower has gone meanwhile: then the result is meaningless."""
        try:
            result = self._step.result()
        except RuntimeError as error:
            raise _cause(self._sender, error) from error
        self._sender.check()
        return result


def _cause(sender: PlanSender, error: RuntimeError) -> RuntimeError:
    """Return the cause of a failed collective. The watch notices a lost rank slightly later than the collective."""
    deadline = time.monotonic() + 1.0
    while sender.loss is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        sender.check()
    except GroupFailed as failure:
        return failure
    return error


def follow_plans(runner: Runner, receiver: PlanReceiver, *, depth: int) -> None:
    """Run plans until there are no more, at most `depth` steps ahead of the last finished one."""
    pending: deque[PendingStep] = deque()
    while (plan := receiver.receive()) is not None:
        pending.append(runner.launch(plan))
        if len(pending) > depth:
            pending.popleft().result()
    for step in pending:
        step.result()

"""Steps on their way from the rank that schedules to those that follow.

    EngineCore ──StepPlan──> LeadingRunner ─┬─> its own runner
                                            ├──Mesh──> follow_plans: another rank's runner
                                            └──Mesh──> ...

A plan is sent as it is: it carries differences only. Nothing comes back. Sampled tokens are equal on all ranks, and a
rank that does not keep up is waited for in the next step's first collective.
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
    """The scheduling rank's end."""

    def __init__(self, member: Member, rendezvous: RendezvousClient, groups: ParallelGroups) -> None:
        """Returns when all followers are connected. Raises `GroupFailed`."""
        self._mesh = Mesh(_NAME, member, rendezvous, groups, member.tp_ranks[1:], grace_s=0.0)
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def loss(self) -> str | None:
        """The follower that has gone."""
        return self._mesh.loss

    def send(self, plan: StepPlan) -> None:
        """Returns at once. Raises `GroupFailed` where a follower has gone."""
        self._mesh.send(self._encode(plan))

    def check(self) -> None:
        """Raises `GroupFailed` where a follower has gone."""
        self._mesh.check()

    def close(self, *, well: bool = True) -> None:
        """Tells the followers that there are no more plans, or, where it does not end well, nothing: they see it."""
        self._mesh.close(well=well)


class PlanReceiver:
    """A follower's end."""

    def __init__(self, member: Member, rendezvous: RendezvousClient, groups: ParallelGroups) -> None:
        """Raises `GroupFailed` where nobody sends plans."""
        self._leader = member.tp_ranks[0]
        self._mesh = Mesh(_NAME, member, rendezvous, groups, [self._leader])
        self._decode = msgspec.msgpack.Decoder(StepPlan).decode

    def receive(self) -> StepPlan | None:
        """The next plan, waited for at no cost; None: there are no more. Raises `GroupFailed`: the leader has gone."""
        message = self._mesh.receive()
        if message is None:
            return None
        try:
            return self._decode(message)
        except msgspec.DecodeError as error:
            raise GroupFailed(f"rank {self._leader} sent what is no plan: {error}") from error

    def close(self) -> None:
        """Before the leader ends, that is a loss to it."""
        self._mesh.close(well=False)


class LeadingRunner:
    """The runner of the rank that schedules, whose followers run the same steps. Implements `core.step.Runner`."""

    def __init__(self, runner: Runner, sender: PlanSender) -> None:
        self._runner = runner
        self._sender = sender

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises `GroupFailed` once a follower has gone."""
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
        """Raises `GroupFailed` where a follower went during the step: what it computed then means nothing."""
        try:
            result = self._step.result()
        except RuntimeError as error:
            raise _cause(self._sender, error) from error
        self._sender.check()
        return result


def _cause(sender: PlanSender, error: RuntimeError) -> RuntimeError:
    """A collective fails a moment before the watch knows that the other end has gone."""
    deadline = time.monotonic() + 1.0
    while sender.loss is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        sender.check()
    except GroupFailed as failure:
        return failure
    return error


def follow_plans(runner: Runner, receiver: PlanReceiver, *, depth: int) -> None:
    """Runs what comes until there is no more, at most `depth` steps ahead of what is finished."""
    pending: deque[PendingStep] = deque()
    while (plan := receiver.receive()) is not None:
        pending.append(runner.launch(plan))
        if len(pending) > depth:
            pending.popleft().result()
    for step in pending:
        step.result()

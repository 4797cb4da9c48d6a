"""A member's connections to its group: the rendezvous, the collectives, the transport of plans, and wake-ups.

A data-parallel rank that gets work wakes the others, through a mesh of the ranks that schedule:

    dp 0 ── wave 7 ──> dp 1, dp 2, ...

When a rank is lost, the groups are closed, so that no other rank waits for it. Results that a GPU computes from then on
are meaningless, and are not returned (`WatchedRunner`).
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..core.lockstep import Lockstep
from ..core.step import PendingStep, Runner, StepPlan, StepResult
from .collectives import connect_groups
from .groups import ALL_ALONE, CollectiveFailed, ExpertSpread, GroupFailed, ParallelGroups
from .member import Member
from .mesh import Mesh
from .plans import LeadingRunner, PlanReceiver, PlanSender, follow_plans
from .rendezvous import RendezvousClient

_PATIENCE_S = 2.0  # how long after a failure its reason may arrive

logger = logging.getLogger(__name__)
_WAVE = struct.Struct("<q")


class RankGroup:
    """One member's connections to its group, from start to end. For a member by itself, all methods do nothing.

    `groups`, `dp_wake`, `sender` and `receiver` are those connections that this rank's role needs; see `join`.
    """

    def __init__(
        self, member: Member, spread: ExpertSpread | None = None, *, timeout_s: float, peer_memory: bool = True
    ) -> None:
        """`spread`: how experts are spread over all ranks, if they are. For the others see `connect_groups`.

        Raises `GroupFailed` if the group has no rendezvous.
        """
        self._member = member
        self._timeout_s = timeout_s
        self._peer_memory = peer_memory
        self._spread = spread
        self.groups: ParallelGroups = ALL_ALONE
        self.rendezvous: RendezvousClient | None = None
        self.dp_wake: DPWake | None = None
        self.sender: PlanSender | None = None
        self.receiver: PlanReceiver | None = None
        if member.tensor_parallel_size > 1 or (spread is not None and member.data_parallel_size > 1):
            self.rendezvous = RendezvousClient(member.rendezvous, member.rank, timeout_s=member.start_timeout_s)

    def join(self, device: torch.device) -> None:
        """Connect to all members. Raises `GroupFailed`."""
        if self.rendezvous is None:
            return
        self.groups = connect_groups(
            self._member,
            self.rendezvous,
            device,
            self._spread,
            timeout_s=self._timeout_s,
            peer_memory=self._peer_memory,
        )
        if self._member.tp_rank == 0 and self.groups.dp.size > 1:
            self.dp_wake = DPWake(self._member, self.rendezvous, self.groups)
        if self._member.tp_rank > 0:
            self.receiver = PlanReceiver(self._member, self.rendezvous, self.groups)
        elif self._member.tensor_parallel_size > 1:
            self.sender = PlanSender(self._member, self.rendezvous, self.groups)

    def lockstep(self, *, review_experts_every: int) -> Lockstep | None:
        """Return the lockstep of this rank, which schedules, with the others; None if experts are not spread."""
        dp, dp_wake = self.groups.dp, self.dp_wake
        if self.groups.spread is None:
            return None
        wake_others = _wake_nobody if dp_wake is None else dp_wake.wake_others
        lockstep = Lockstep(dp.rank, dp.size, dp.all_max, wake_others, review_experts_every=review_experts_every)
        if dp_wake is not None:
            dp_wake.listen(lockstep.on_wake)
        return lockstep

    def leading(self, runner: Runner) -> Runner:
        """Return a runner that also runs steps on the ranks that follow. Its results raise once a rank has gone."""
        if self.sender is not None:
            runner = LeadingRunner(runner, self.sender)
        return runner if self.dp_wake is None else WatchedRunner(runner, self.dp_wake)

    def follow(self, runner: Runner, *, depth: int) -> None:
        """Run the steps of the rank that schedules, until it ends. Raises `GroupFailed` if it fails."""
        assert self.receiver is not None, "only a rank that does not schedule follows"
        follow_plans(runner, self.receiver, depth=depth)

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Report a failure in the context, even Ctrl-C, to the other members. If theirs came first, raise that."""
        try:
            yield
        except BaseException as error:
            cause = self._report_failure(error)
            self.close(orderly=False)
            if cause is None or not isinstance(error, CollectiveFailed):
                raise
            raise GroupFailed(cause) from error

    def close(self, *, orderly: bool = True) -> None:
        """Close the connections; on the rank that schedules, this ends the whole group. A second call does nothing.

        With `orderly=False`, the others learn that this rank is lost, and stop waiting for it.
        """
        if self.sender is not None:
            self.sender.close(orderly=orderly)
        if self.receiver is not None:
            self.receiver.close()
        if self.dp_wake is not None:
            self.dp_wake.close(orderly=orderly)
        self.groups.close()
        self.sender = self.receiver = self.dp_wake = None

    def _report_failure(self, error: BaseException) -> str | None:
        """Report a failure. Returns the failure of another rank that caused it; None if this one came first."""
        if self.rendezvous is None:
            return None
        try:
            if isinstance(error, CollectiveFailed):
                deadline = time.monotonic() + _PATIENCE_S
                while self.rendezvous.failure() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
            failure = self.rendezvous.failure()
            if failure is None:
                self.rendezvous.fail(str(error) or repr(error))
        except GroupFailed as lost:  # the rendezvous has gone, with the process that served it
            return str(lost)
        return failure


def _wake_nobody(wave: int) -> None:
    """Do nothing: there is only one data-parallel rank."""


class DPWake:
    """One rank's end. One thread may call `wake_others`; wake-ups arrive on a thread of this object."""

    def __init__(self, member: Member, rendezvous: RendezvousClient, groups: ParallelGroups) -> None:
        """Connect to all other ranks. Raises `GroupFailed`."""
        others = [rank for rank in member.dp_ranks if rank != member.rank]
        self._mesh = Mesh("waves", member, rendezvous, groups, others)
        self._thread: threading.Thread | None = None

    def listen(self, on_wake: Callable[[int], None]) -> None:
        """Have `on_wake` called with the number of each wave that another rank begins, from now on."""
        self._thread = threading.Thread(target=self._run, args=(on_wake,), name="baton-dp-wake", daemon=True)
        self._thread.start()

    def wake_others(self, wave: int) -> None:
        """Send a wake-up and return at once. Raises `GroupFailed` if a rank has gone."""
        self._mesh.send(_WAVE.pack(wave))

    def check(self) -> None:
        """Raise `GroupFailed` if a rank has gone."""
        self._mesh.check()

    def close(self, *, orderly: bool = True) -> None:
        """Close the connections; see `Mesh.close`. Later calls do nothing."""
        self._mesh.close(orderly=orderly, receiver=self._thread)

    def _run(self, on_wake: Callable[[int], None]) -> None:
        with contextlib.suppress(GroupFailed):  # the next step raises it
            while (message := self._mesh.receive()) is not None:
                if len(message) == _WAVE.size:
                    on_wake(*_WAVE.unpack(message))
                else:
                    logger.warning("a wake-up of %d bytes, which is not a wave's number, was dropped", len(message))


class WatchedRunner:
    """A runner whose results raise once another data-parallel rank has gone. Implements `core.step.Runner`.

    When the groups are closed, a step that waited for the lost rank ends, but its result is meaningless.
    """

    def __init__(self, runner: Runner, dp_wake: DPWake) -> None:
        self._runner = runner
        self._dp_wake = dp_wake

    def launch(self, plan: StepPlan) -> PendingStep:
        return _WatchedStep(self._runner.launch(plan), self._dp_wake)


class _WatchedStep:
    def __init__(self, step: PendingStep, dp_wake: DPWake) -> None:
        self._step = step
        self._dp_wake = dp_wake

    def result(self) -> StepResult:
        """Return the step's result. Raises `GroupFailed` if a rank has gone meanwhile."""
        result = self._step.result()
        self._dp_wake.check()
        return result

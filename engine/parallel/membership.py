"""A member's ties to its group: where it meets the others, the groups, and the way of the plans."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..core.lockstep import Lockstep
from ..core.step import Runner
from .collectives import connect_groups
from .errors import CollectiveFailed, GroupFailed
from .groups import ALL_ALONE, ExpertSpread, ParallelGroups
from .member import Member
from .plans import LeadingRunner, PlanReceiver, PlanSender, follow_plans
from .rendezvous import Meeting
from .waves import WatchedRunner, Waves

_PATIENCE_S = 2.0  # for the reason of a failure to arrive, behind the failure


class Membership:
    """Of one member, from its start to its end. A member by itself has no ties, and all of this does nothing."""

    def __init__(
        self, member: Member, spread: ExpertSpread | None = None, *, timeout_s: float, peer_memory: bool = True
    ) -> None:
        """`spread`: how experts lie on all ranks, if they do. `timeout_s` and `peer_memory`: see `connect_groups`.

        Raises `GroupFailed` where the group has no rendezvous.
        """
        self._member = member
        self._timeout_s = timeout_s
        self._peer_memory = peer_memory
        self._spread = spread
        self.groups: ParallelGroups = ALL_ALONE
        self.meeting: Meeting | None = None
        self._waves: Waves | None = None
        self._sender: PlanSender | None = None
        self._receiver: PlanReceiver | None = None
        if member.tensor_parallel_size > 1 or (spread is not None and member.data_parallel_size > 1):
            self.meeting = Meeting(member.rendezvous, member.rank, timeout_s=member.start_timeout_s)

    def join(self, device: torch.device) -> None:
        """Returns when all members are there, and connected. Raises `GroupFailed`."""
        if self.meeting is None:
            return
        self.groups = connect_groups(
            self._member,
            self.meeting,
            device,
            self._spread,
            timeout_s=self._timeout_s,
            peer_memory=self._peer_memory,
        )
        if self._member.tp_rank == 0 and self.groups.dp.size > 1:
            self._waves = Waves(self._member, self.meeting, self.groups)
        if self._member.tp_rank > 0:
            self._receiver = PlanReceiver(self._member, self.meeting, self.groups)
        elif self._member.tensor_parallel_size > 1:
            self._sender = PlanSender(self._member, self.meeting, self.groups)

    def lockstep(self, *, review_experts_every: int) -> Lockstep | None:
        """How this rank, which schedules, steps together with the others; None where experts are not spread."""
        dp, waves = self.groups.dp, self._waves
        if self.groups.spread is None:
            return None
        wake_others = _wake_nobody if waves is None else waves.wake_others
        lockstep = Lockstep(dp.rank, dp.size, dp.agree, wake_others, review_experts_every=review_experts_every)
        if waves is not None:
            waves.listen(lockstep.on_wake)
        return lockstep

    def leading(self, runner: Runner) -> Runner:
        """`runner`, and with it those of the ranks that follow; without results once a rank of the group has gone."""
        if self._sender is not None:
            runner = LeadingRunner(runner, self._sender)
        return runner if self._waves is None else WatchedRunner(runner, self._waves)

    def follow(self, runner: Runner, *, depth: int) -> None:
        """Runs the steps of the rank that schedules until it ends. Raises `GroupFailed` where it does not end well."""
        assert self._receiver is not None, "only a rank that does not schedule follows"
        follow_plans(runner, self._receiver, depth=depth)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What fails within, Ctrl-C too, the other members hear of; where one of them failed first, that is raised."""
        try:
            yield
        except BaseException as error:
            cause = self._tell(error)
            self.close(well=False)
            if cause is None or not isinstance(error, CollectiveFailed):
                raise
            raise GroupFailed(cause) from error

    def close(self, *, well: bool = True) -> None:
        """Ends the ties, and on the rank that schedules the group. Once is enough.

        `well`: or else the others learn that this rank is lost to them, and wait for it no longer.
        """
        if self._sender is not None:
            self._sender.close(well=well)
        if self._receiver is not None:
            self._receiver.close()
        if self._waves is not None:
            self._waves.close(well=well)
        self.groups.close()
        self._sender = self._receiver = self._waves = None

    def _tell(self, error: BaseException) -> str | None:
        """What failed elsewhere and made this fail; None where this came first."""
        if self.meeting is None:
            return None
        try:
            if isinstance(error, CollectiveFailed):
                deadline = time.monotonic() + _PATIENCE_S
                while self.meeting.failure() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
            failure = self.meeting.failure()
            if failure is None:
                self.meeting.fail(str(error) or repr(error))
        except GroupFailed as lost:  # the rendezvous has gone, and its owner with it
            return str(lost)
        return failure


def _wake_nobody(wave: int) -> None:
    """There is one data-parallel rank."""

"""Steps on their way from the rank that schedules to those that follow.

    EngineCore ──StepPlan──> LeadingRunner ─┬─> its own runner
                                            ├──PUSH──PULL──> follow_plans: another rank's runner
                                            └──PUSH──PULL──> ...

A plan is sent as it is: it carries differences only. Nothing comes back. Sampled tokens are equal on all ranks, and a
rank that does not keep up is waited for in the next step's first collective.

A pair of sockets is also how its two ends know that the other lives: a Unix socket within a machine, TCP with
heartbeats between machines. When one goes, the groups are closed, which ends whatever collective waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque

import msgspec
import zmq

from ..core.step import PendingStep, Runner, StepPlan, StepResult
from .addresses import Addresses, connect
from .errors import GroupFailed
from .groups import ParallelGroups
from .member import Member
from .rendezvous import Meeting
from .watch import Watch, inproc_pair

logger = logging.getLogger(__name__)

_END = b""  # in place of a plan: the group ends as it should
_LINGER_MS = 1000
_GRACE_S = 1.0  # for a follower to read what its leader said last


class PlanSender:
    """The scheduling rank's end: one socket a follower."""

    def __init__(self, member: Member, meeting: Meeting, groups: ParallelGroups) -> None:
        """Returns when all followers are connected. Raises `GroupFailed`."""
        self._meeting = meeting
        self._groups = groups
        self._encode = msgspec.msgpack.Encoder().encode
        self._addresses = Addresses(member)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[zmq.Socket[bytes], str] = {}
        self.loss: str | None = None  # who has gone
        self._watch = Watch(self._context, self._lose)
        try:
            for rank in member.tp_ranks[1:]:
                socket = self._context.socket(zmq.PUSH)
                self._sockets[socket] = f"rank {rank}"
                socket.set_hwm(1000)  # steps: far more than are ever under way
                self._watch.add(socket, f"rank {rank}")
                meeting.put(f"plans/{rank}", self._addresses.bind(socket, [meeting.get(f"here/{rank}")]))
            self._watch.wait_connected(member.start_timeout_s, meeting.check)
        except GroupFailed:
            self._give_back(linger=0)
            raise
        self._watch.start()

    def send(self, plan: StepPlan) -> None:
        """Returns at once. Raises `GroupFailed` where a follower has gone."""
        self.check()
        message = self._encode(plan)
        for socket, name in self._sockets.items():
            try:
                socket.send(message, zmq.NOBLOCK)
            except zmq.Again:
                raise GroupFailed(f"{name} takes no more steps") from None

    def check(self) -> None:
        """Raises `GroupFailed` where a follower has gone."""
        if self.loss is not None:
            raise GroupFailed(self._meeting.failure() or f"{self.loss} has gone")

    def close(self, *, well: bool = True) -> None:
        """Tells the followers that there are no more plans, or, where it does not end well, nothing: they see it."""
        if self._context.closed:
            return
        self._watch.close()
        if well and self.loss is None:
            for socket in self._sockets:
                with contextlib.suppress(zmq.Again):  # one that takes nothing any more is told by the disconnection
                    socket.send(_END, zmq.NOBLOCK)
        self._give_back(linger=_LINGER_MS)

    def _give_back(self, *, linger: int) -> None:
        self._context.destroy(linger=linger)
        self._addresses.remove()

    def _lose(self, name: str) -> None:
        logger.error("%s has gone: the group ends", name)
        self.loss = name
        self._groups.close()


class PlanReceiver:
    """A follower's end."""

    def __init__(self, member: Member, meeting: Meeting, groups: ParallelGroups) -> None:
        """Raises `GroupFailed` where nobody sends plans."""
        self._groups = groups
        self._leader = f"rank {member.tp_ranks[0]}"
        self._decode = msgspec.msgpack.Decoder(StepPlan).decode
        address = meeting.get(f"plans/{member.rank}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._bell, self._ringer = inproc_pair(self._context)
        self._watch = Watch(self._context, self._lose)
        self._watch.add(self._socket, self._leader)
        self._ended = threading.Event()
        connect(self._socket, address, member)
        try:
            self._watch.wait_connected(member.start_timeout_s, meeting.check)
        except GroupFailed:
            self._context.destroy(linger=0)
            raise
        self._watch.start()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)

    def receive(self) -> StepPlan | None:
        """The next plan, waited for at no cost; None: there are no more. Raises `GroupFailed`: the leader has gone."""
        ready = dict(self._poller.poll())
        if self._socket not in ready:
            raise GroupFailed(f"{self._leader} has gone")
        message = self._socket.recv()
        if message == _END:
            self._ended.set()
            return None
        try:
            return self._decode(message)
        except msgspec.DecodeError as error:
            raise GroupFailed(f"{self._leader} sent what is no plan: {error}") from error

    def close(self) -> None:
        if self._context.closed:
            return
        self._ended.set()
        self._watch.close()
        self._context.destroy(linger=0)

    def _lose(self, name: str) -> None:
        """A leader that has ended as it should goes as well, right behind its last message."""
        self._ringer.send(b"")
        if not self._ended.wait(_GRACE_S):
            self._groups.close()


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

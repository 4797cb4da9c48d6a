"""How a data-parallel rank that gets work wakes the others: one socket to each, between the ranks that schedule.

    dp 0 ── wave 7 ──PUSH──PULL──> dp 1        each rank pulls at one address, and pushes to those of all others
         <──PULL──PUSH───────────

The same sockets tell that the others live: when one goes, the groups are closed, so that nobody waits for it. What a
GPU has computed from then on means nothing, and is not handed out (`WatchedRunner`).
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections.abc import Callable

import zmq

from ..core.step import PendingStep, Runner, StepPlan, StepResult
from .addresses import Addresses, connect
from .errors import GroupFailed
from .groups import ParallelGroups
from .member import Member
from .rendezvous import Meeting
from .watch import Watch, inproc_pair

logger = logging.getLogger(__name__)

_WAVE = struct.Struct("<q")
_END = b""  # in place of a wave: this rank ends as it should
_LINGER_MS = 1000
_GRACE_S = 1.0  # for a rank's last message to be read before its end counts as a loss


class Waves:
    """One rank's end. `wake_others` is for one thread; wakes arrive on a thread of its own."""

    def __init__(self, member: Member, meeting: Meeting, groups: ParallelGroups) -> None:
        """Returns when all ranks are connected. Raises `GroupFailed`."""
        self._meeting = meeting
        self._groups = groups
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._addresses = Addresses(member)
        self._pull = self._context.socket(zmq.PULL)
        self._loss: str | None = None  # who has gone
        self._ended = threading.Event()  # a rank has said that it ends
        self._bell, self._ringer = inproc_pair(self._context)
        self._watch = Watch(self._context, self._lose)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._thread: threading.Thread | None = None
        others = [rank for rank in member.dp_ranks if rank != member.rank]
        try:
            address = self._addresses.bind(self._pull, [meeting.get(f"here/{rank}") for rank in others])
            meeting.put(f"waves/{member.rank}", address)
            for rank in others:
                self._connect(member, rank)
            self._watch.wait_connected(member.start_timeout_s, meeting.check)
        except GroupFailed:
            self._give_back(linger=0)
            raise
        self._watch.start()

    def listen(self, on_wake: Callable[[int], None]) -> None:
        """From now on, `on_wake` is called with the waves that others begin."""
        self._thread = threading.Thread(target=self._run, args=(on_wake,), name="baton-waves", daemon=True)
        self._thread.start()

    def wake_others(self, wave: int) -> None:
        """Returns at once. Raises `GroupFailed` where a rank has gone."""
        self.check()
        for socket in self._sockets:
            try:
                socket.send(_WAVE.pack(wave), zmq.NOBLOCK)
            except zmq.Again:
                raise GroupFailed("a rank takes no more wakes") from None

    def check(self) -> None:
        """Raises `GroupFailed` where a rank has gone."""
        if self._loss is not None:
            raise GroupFailed(self._meeting.failure() or f"{self._loss} has gone")

    def close(self) -> None:
        """Tells the others that this rank ends. Once is enough."""
        if self._context.closed:
            return
        known = self._ended.is_set()  # to all: whoever ended first has told everyone
        self._ended.set()
        self._watch.close()
        for socket in () if known else self._sockets:
            with contextlib.suppress(zmq.Again):  # one that takes nothing any more is told by the disconnection
                socket.send(_END, zmq.NOBLOCK)
        if self._thread is not None:
            self._ringer.send(b"")
            self._thread.join()
        self._give_back(linger=_LINGER_MS)

    def _give_back(self, *, linger: int) -> None:
        self._context.destroy(linger=linger)
        self._addresses.remove()

    def _connect(self, member: Member, rank: int) -> None:
        address = self._meeting.get(f"waves/{rank}")
        socket = self._context.socket(zmq.PUSH)
        self._watch.add(socket, f"rank {rank}")
        connect(socket, address, member)
        self._sockets.append(socket)

    def _run(self, on_wake: Callable[[int], None]) -> None:
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell in ready:
                break
            message = self._pull.recv()
            if message == _END:
                self._ended.set()
            elif len(message) == _WAVE.size:
                on_wake(*_WAVE.unpack(message))
            else:
                logger.warning("%d bytes that are no wave were dropped", len(message))

    def _lose(self, name: str) -> None:
        """A rank that has ended as it should goes as well, right behind its last message."""
        if self._ended.wait(_GRACE_S):
            return
        logger.error("%s has gone: the group ends", name)
        self._loss = name
        self._groups.close()


class WatchedRunner:
    """A runner that gives no results once another data-parallel rank has gone. Implements `core.step.Runner`.

    A step that waited for that rank has come back all the same, when the groups were closed.
    """

    def __init__(self, runner: Runner, waves: Waves) -> None:
        self._runner = runner
        self._waves = waves

    def launch(self, plan: StepPlan) -> PendingStep:
        return _WatchedStep(self._runner.launch(plan), self._waves)


class _WatchedStep:
    def __init__(self, step: PendingStep, waves: Waves) -> None:
        self._step = step
        self._waves = waves

    def result(self) -> StepResult:
        """Raises `GroupFailed` where a rank went during the step."""
        result = self._step.result()
        self._waves.check()
        return result

"""Reads of many batches on their way: a few at a time for each receive, so that none starves the others."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.core.connector import TransferId

from .descriptors import batches
from .errors import TransportError
from .transports import ByteRange, PeerHandle, ReadHandle, ReadState, Transport


class PullOutcome(enum.Enum):
    FINISHED = enum.auto()  # all bytes are there, nothing can write any more
    FAILED = enum.auto()  # RELEASED follows
    RELEASED = enum.auto()  # nothing can write any more


class PullEvent(NamedTuple):
    receive: TransferId
    outcome: PullOutcome
    reason: str = ""


@dataclasses.dataclass(slots=True)
class _Pull:
    receive: TransferId
    peer: PeerHandle
    waiting: collections.deque[list[ByteRange]]
    running: list[ReadHandle] = dataclasses.field(default_factory=list)
    releasing: list[ReadHandle] = dataclasses.field(default_factory=list)
    ended_early: bool = False  # stopped or failed: no further batch


class Pulls:
    """The transport's reads on behalf of receives."""

    def __init__(self, transport: Transport, batch_bytes: int, reads_in_flight: int) -> None:
        self._transport = transport
        self._batch_bytes = batch_bytes
        self._reads_in_flight = reads_in_flight
        self._pulls: dict[TransferId, _Pull] = {}
        self.num_bytes = 0  # asked of the transport since the start
        self.num_descriptors = 0

    def __len__(self) -> int:
        return len(self._pulls)

    def uses(self, peer: PeerHandle) -> bool:
        return any(pull.peer == peer for pull in self._pulls.values())

    def start(self, receive: TransferId, peer: PeerHandle, ranges: Sequence[ByteRange]) -> None:
        waiting = collections.deque(batches(ranges, self._batch_bytes))
        self._pulls[receive] = _Pull(receive, peer, waiting)

    def stop(self, receive: TransferId) -> None:
        pull = self._pulls.get(receive)
        if pull is not None:
            pull.ended_early = True

    def poll(self) -> list[PullEvent]:
        events: list[PullEvent] = []
        for pull in list(self._pulls.values()):
            events += self._advance(pull)
        return events

    def _advance(self, pull: _Pull) -> list[PullEvent]:
        events: list[PullEvent] = []
        reason = "" if pull.ended_early else self._start_batches(pull)
        reason = self._settle(pull) or reason
        if reason and not pull.ended_early:
            pull.ended_early = True
            events.append(PullEvent(pull.receive, PullOutcome.FAILED, reason))
        pull.releasing = [read for read in pull.releasing if not self._transport.release(read)]
        if not pull.running and not pull.releasing and (pull.ended_early or not pull.waiting):
            del self._pulls[pull.receive]
            outcome = PullOutcome.RELEASED if pull.ended_early else PullOutcome.FINISHED
            events.append(PullEvent(pull.receive, outcome))
        return events

    def _settle(self, pull: _Pull) -> str:
        """Moves ended reads to `releasing`. Returns why one failed, or nothing."""
        reason = ""
        for read in list(pull.running):
            state = self._transport.poll(read)
            if state is ReadState.RUNNING:
                continue
            pull.running.remove(read)
            pull.releasing.append(read)
            if state is ReadState.FAILED:
                reason = "the transport lost the connection to the peer's memory"
        return reason

    def _start_batches(self, pull: _Pull) -> str:
        while pull.waiting and len(pull.running) < self._reads_in_flight:
            batch = pull.waiting.popleft()
            try:
                pull.running.append(self._transport.read(pull.peer, batch))
            except TransportError as error:
                return str(error)
            self.num_bytes += sum(piece.num_bytes for piece in batch)
            self.num_descriptors += len(batch)
        return ""

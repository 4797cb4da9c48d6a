"""Reads of many batches on their way: a few at a time for each receive, so that none starves the others.

Where the holder is still writing, a pull learns bit by bit what there is to read. It is finished with the last block.

A transport may neither end a read nor fail it, over a way that is lost to the data but not to the messages. A pull of
which no batch has ended for `stall_s` fails; what was begun is let go when the transport says so, however late.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from baton.engine.core.connector import TransferId

from ..group.crew import Crew
from ..group.crew_messages import MAX_ORDER_BLOCKS
from ..transports import PeerHandle, ReadHandle, ReadState


class PullOutcome(enum.Enum):
    FINISHED = enum.auto()  # all bytes are there, nothing can write any more
    FAILED = enum.auto()  # RELEASED follows
    RELEASED = enum.auto()  # nothing can write any more


class PullEvent(NamedTuple):
    receive: TransferId
    outcome: PullOutcome
    reason: str = ""


class _Batch(NamedTuple):
    source_blocks: Sequence[int]
    blocks: Sequence[int]


@dataclasses.dataclass(slots=True)
class _Pull:
    receive: TransferId
    peer: PeerHandle
    num_to_come: int  # blocks that nobody has named yet
    waiting: collections.deque[_Batch] = dataclasses.field(default_factory=collections.deque)
    running: dict[ReadHandle, int] = dataclasses.field(default_factory=dict)  # with the number of blocks
    releasing: list[ReadHandle] = dataclasses.field(default_factory=list)
    ended_early: bool = False  # stopped or failed: no further batch
    moved_at: float = 0.0  # when a batch ended, or the first of those on their way began

    @property
    def has_all(self) -> bool:
        return not self.waiting and not self.num_to_come

    @property
    def is_under_way(self) -> bool:
        return bool(self.running or self.releasing)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.is_under_way or self.ended_early or self.has_all)


class Pulls:
    """The crew's reads on behalf of receives, of `batch_bytes` a rank at most where that holds a block."""

    def __init__(self, crew: Crew, batch_bytes: int, reads_in_flight: int, stall_s: float) -> None:
        self._crew = crew
        self._batch_blocks = max(1, min(batch_bytes // crew.block_bytes, MAX_ORDER_BLOCKS))
        self._reads_in_flight = reads_in_flight
        self._stall_s = stall_s
        self._pulls: dict[TransferId, _Pull] = {}
        self.num_early = 0  # blocks that came while others of the same receive were not named yet

    def __len__(self) -> int:
        return len(self._pulls)

    def __contains__(self, receive: TransferId) -> bool:
        return receive in self._pulls

    @property
    def any_busy(self) -> bool:
        """One has more to do than to wait for what the holder writes."""
        return any(pull.is_busy for pull in self._pulls.values())

    def of(self, peer: PeerHandle) -> list[TransferId]:
        return [pull.receive for pull in self._pulls.values() if pull.peer == peer]

    def uses(self, peer: PeerHandle) -> bool:
        return bool(self.of(peer))

    @property
    def given_up(self) -> set[PeerHandle]:
        """Of whose memory something is left of a pull that was stopped or failed."""
        return {pull.peer for pull in self._pulls.values() if pull.ended_early}

    def start(self, receive: TransferId, peer: PeerHandle, num_blocks: int) -> None:
        """Of `num_blocks` in all, none of which may be read yet."""
        self._pulls[receive] = _Pull(receive, peer, num_blocks)

    def extend(self, receive: TransferId, source_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """These may be read."""
        pull, size = self._pulls[receive], self._batch_blocks
        starts = range(0, len(blocks), size)
        pull.waiting.extend(_Batch(source_blocks[at : at + size], blocks[at : at + size]) for at in starts)
        pull.num_to_come -= len(blocks)

    def stop(self, receive: TransferId) -> None:
        pull = self._pulls.get(receive)
        if pull is not None:
            pull.ended_early = True

    def poll(self, now: float) -> list[PullEvent]:
        events: list[PullEvent] = []
        for pull in list(self._pulls.values()):
            events += self._advance(pull, now)
        return events

    def _advance(self, pull: _Pull, now: float) -> list[PullEvent]:
        events: list[PullEvent] = []
        if not pull.is_under_way:
            pull.moved_at = now
        reason = self._settle(pull, list(pull.running), now)  # what has ended makes room
        if not reason and not pull.ended_early:
            reason = self._settle(pull, self._start_batches(pull), now)  # some transports copy before they return
        if not reason and pull.is_under_way and now - pull.moved_at >= self._stall_s:
            reason = f"no part of it has come for {self._stall_s:g} s (transfer.stall_s)"
        if reason and not pull.ended_early:
            pull.ended_early = True
            events.append(PullEvent(pull.receive, PullOutcome.FAILED, reason))
        pull.releasing = [read for read in pull.releasing if not self._crew.release(read)]
        if not pull.is_under_way and (pull.ended_early or pull.has_all):
            del self._pulls[pull.receive]
            outcome = PullOutcome.RELEASED if pull.ended_early else PullOutcome.FINISHED
            events.append(PullEvent(pull.receive, outcome))
        return events

    def _settle(self, pull: _Pull, reads: Sequence[ReadHandle], now: float) -> str:
        """Moves those of the running `reads` that have ended to `releasing`. Returns why one failed, or nothing."""
        reason = ""
        for read in reads:
            state = self._crew.poll(read)
            if state is ReadState.RUNNING:
                continue
            pull.moved_at = now
            num_blocks = pull.running.pop(read)
            pull.releasing.append(read)
            if state is ReadState.FAILED:
                reason = self._crew.reason(read)
            elif pull.num_to_come:
                self.num_early += num_blocks
        return reason

    def _start_batches(self, pull: _Pull) -> list[ReadHandle]:
        started = []
        while pull.waiting and len(pull.running) < self._reads_in_flight:
            batch = pull.waiting.popleft()
            started.append(self._crew.read(pull.peer, batch.source_blocks, batch.blocks))
            pull.running[started[-1]] = len(batch.blocks)
        return started

"""Read blocks for receives, in batches. Each receive has a few batches running, so that none starves the others.

While the holder is still writing, a read learns step by step which blocks are written. It ends with the last of them.

Each read is timed, and a long one or one that has to wait for its holder several times. Recent times predict how long
reads of a peer take (`ReadPace`).

A network path may fail for data and still carry messages; then the transport neither finishes nor fails a batch. A read
fails when none of its batches has ended for `stall_s`, but its batches are released only when the transport says so.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from baton.engine.core.connector import TransferId
from baton.engine.core.pace import Line, LineFit

from ..descriptors import bytes_of
from ..group.read_messages import MAX_ORDER_BLOCKS
from ..group.tp_read_group import TpReadGroup
from ..protocol.block_runs import BlockNumbers
from ..transports import PeerHandle, ReadHandle, ReadState
from ..transports.common import PROBE_BYTES

MEASURED_S = 0.1  # a longer read is measured before its end, so that a link that has become slow is noticed soon
APART = 64  # ratio of the two sizes that define a line with a constant part
BATCH_S = 2e-3  # a batch costs the CPU 0.2 ms to begin, and a cancelled read runs until its batches end


class ReadOutcome(enum.Enum):
    FINISHED = enum.auto()  # all bytes are here, and nothing can write into the blocks any more
    FAILED = enum.auto()  # RELEASED follows
    RELEASED = enum.auto()  # a failed or stopped read can no longer write


class ReadEvent(NamedTuple):
    receive: TransferId
    outcome: ReadOutcome
    reason: str = ""


@dataclasses.dataclass(slots=True)
class TimedRead:
    """A read, or a part of one, that is being timed."""

    began_s: float
    blocks_before: float  # number of blocks read from the peer before it began, in part those of running batches
    batch_s: float = 0.0  # longest time of a batch that ended meanwhile


class RunningBatch(NamedTuple):
    num_blocks: int  # of the first cache group
    began_s: float

    def share_s(self, since_s: float, now_s: float) -> float:
        """Return how long the batch has run since a time, or all of its time if it began later."""
        return now_s - max(self.began_s, since_s)


class ReadPace:
    """Fits the time that a read of one peer takes to its number of blocks.

    Only blocks of the first cache group count: what other groups add to a hand-off does not grow with the prompt.

    The fit begins with the rate that was measured at pairing. If several receives read from the peer at once, each
    counts the blocks of all, so that the fit describes the peer and not a share of it. A batch that began before the
    timed read, or has not ended with it, counts in part: its blocks are taken to come evenly. Of overlapping reads only
    one counts, because a single delay holds up all of them and must not look like several.
    """

    def __init__(self, block_bytes: int, bytes_per_s: float | None, now_s: float, *, constant_bytes: int = 0) -> None:
        """`block_bytes` and `bytes_per_s` are those of one rank, since all ranks read their shares at the same time.

        `constant_bytes` are part of every hand-off, however long its prompt is.
        """
        self._fit = LineFit()
        self.num_blocks = 0  # read so far
        self.num_reads = 0  # measured reads
        self._counted_until_s = now_s
        if bytes_per_s:
            blocks = max(1, PROBE_BYTES // block_bytes)
            for count in (blocks, APART * blocks) if constant_bytes else (blocks,):
                self._fit.add(count, (constant_bytes + count * block_bytes) / bytes_per_s, now_s)

    def ended(self, batch: RunningBatch, timed: Iterable[TimedRead], now_s: float) -> None:
        """Count the blocks of a batch that has ended. `timed` are the reads of the peer that are being timed."""
        self.num_blocks += batch.num_blocks
        taken_s = now_s - batch.began_s
        for read in timed:
            if taken_s > 0:
                read.blocks_before += batch.num_blocks * (1 - batch.share_s(read.began_s, now_s) / taken_s)
            read.batch_s = max(read.batch_s, taken_s)

    def measured(self, ended: Iterable[TimedRead], running: Iterable[RunningBatch], now_s: float) -> None:
        """Add the longest of the reads that ended now, leaving out those that overlap with an earlier measurement.

        `running` are the peer's batches that have not ended. They are taken to last as long as the longest that has.
        """
        apart = [piece for piece in ended if piece.began_s >= self._counted_until_s]
        if apart:
            longest = min(apart, key=lambda piece: piece.began_s)
            self.num_reads, self._counted_until_s = self.num_reads + 1, now_s
            blocks = self.num_blocks - longest.blocks_before
            for batch in running:
                expected_s = max(longest.batch_s, now_s - batch.began_s)
                if expected_s > 0:
                    blocks += batch.num_blocks * batch.share_s(longest.began_s, now_s) / expected_s
            self._fit.add(max(1, round(blocks)), now_s - longest.began_s, now_s)

    def line(self) -> Line | None:
        """Return the fitted line. None: nothing was measured."""
        return self._fit.line()


class _Batch(NamedTuple):
    source_blocks: BlockNumbers
    blocks: BlockNumbers


@dataclasses.dataclass(slots=True)
class _BlockRead:
    receive: TransferId
    peer: PeerHandle
    num_to_come: int  # blocks that are not written yet
    waiting: collections.deque[_Batch] = dataclasses.field(default_factory=collections.deque)
    running: dict[ReadHandle, RunningBatch] = dataclasses.field(default_factory=dict)
    releasing: list[ReadHandle] = dataclasses.field(default_factory=list)
    ended_early: bool = False  # stopped or failed: begin no further batch
    progress_at: float = 0.0  # when the last batch ended, or the first running one began
    piece: TimedRead | None = None  # the part that is being timed

    @property
    def has_all(self) -> bool:
        return not self.waiting and not self.num_to_come

    @property
    def is_under_way(self) -> bool:
        return bool(self.running or self.releasing)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.is_under_way or self.ended_early or self.has_all)


class BlockReads:
    """Reads of a group of ranks on behalf of receives.

    A batch has at most `batch_bytes` for each rank, or what the peer's lane moves in `BATCH_S` if that is more, but at
    least one block.
    """

    def __init__(
        self,
        group: TpReadGroup,
        batch_bytes: int,
        reads_in_flight: int,
        stall_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._group = group
        self._batch_bytes = batch_bytes
        self._reads_in_flight = reads_in_flight
        self._stall_s = stall_s
        self._clock = clock
        self._paces: dict[PeerHandle, ReadPace] = {}
        self._entries: dict[TransferId, _BlockRead] = {}
        self._ended: collections.defaultdict[PeerHandle, list[TimedRead]] = collections.defaultdict(list)
        self.num_early = 0  # blocks that were read before all blocks of their receive were written

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, receive: TransferId) -> bool:
        return receive in self._entries

    @property
    def any_busy(self) -> bool:
        """True unless all reads only wait for blocks to be written."""
        return any(entry.is_busy for entry in self._entries.values())

    def of(self, peer: PeerHandle) -> list[TransferId]:
        """Return the receives that read from this memory."""
        return [entry.receive for entry in self._of(peer)]

    def _of(self, peer: PeerHandle) -> list[_BlockRead]:
        return [entry for entry in self._entries.values() if entry.peer == peer]

    def uses(self, peer: PeerHandle) -> bool:
        return bool(self._of(peer))

    @property
    def given_up(self) -> set[PeerHandle]:
        """The memories from which batches still run, although their read was stopped or has failed."""
        return {entry.peer for entry in self._entries.values() if entry.ended_early}

    def pace(self, peer: PeerHandle) -> ReadPace:
        """Return the measured read times of a connected peer."""
        if peer not in self._paces:
            lane = self._group.lane(peer)
            rate = None if lane is None else lane.bytes_per_s
            constant = self._group.region.constant_bytes
            self._paces[peer] = ReadPace(self._group.block_bytes, rate, self._clock(), constant_bytes=constant)
        return self._paces[peer]

    def forget_paces(self, kept: Collection[PeerHandle]) -> None:
        """Forget the measurements of all other peers."""
        self._paces = {peer: pace for peer, pace in self._paces.items() if peer in kept}

    def start(self, receive: TransferId, peer: PeerHandle, num_blocks: int) -> None:
        """Begin a read of `num_blocks` blocks. Batches start once `extend` says that blocks are written."""
        self._entries[receive] = _BlockRead(receive, peer, num_blocks)

    def extend(self, receive: TransferId, source_blocks: BlockNumbers, blocks: BlockNumbers) -> None:
        """Queue blocks that are written and may be read now."""
        entry = self._entries[receive]
        for at, stop in self._batches(entry.peer, blocks):
            entry.waiting.append(_Batch(source_blocks[at:stop], blocks[at:stop]))
        entry.num_to_come -= len(blocks)

    def stop(self, receive: TransferId) -> None:
        """Begin no further batch of a read."""
        entry = self._entries.get(receive)
        if entry is not None:
            entry.ended_early = True

    def poll(self, now: float) -> list[ReadEvent]:
        """Continue all reads and return their events."""
        events: list[ReadEvent] = []
        for entry in list(self._entries.values()):
            events += self._advance(entry, now)
        for peer, ended in self._ended.items():
            running = (batch for entry in self._of(peer) for batch in entry.running.values())
            self.pace(peer).measured(ended, running, self._clock())
        self._ended.clear()
        return events

    def _batches(self, peer: PeerHandle, blocks: BlockNumbers) -> Iterator[tuple[int, int]]:
        """Cut blocks into batches. Yields start and stop of each in the list."""
        lane = self._group.lane(peer)
        in_time = 0.0 if lane is None or lane.bytes_per_s is None else BATCH_S * lane.bytes_per_s
        most_bytes = max(self._batch_bytes, int(in_time))
        at = 0
        if len(self._group.region.arenas) == 1:  # all blocks have one size
            size = min(max(1, most_bytes // self._group.block_bytes), MAX_ORDER_BLOCKS)
            while at < len(blocks):
                yield at, min(at + size, len(blocks))
                at += size
            return
        ends = np.cumsum(bytes_of(self._group.region, blocks))
        while at < len(blocks):
            before = int(ends[at - 1]) if at else 0
            stop = int(np.searchsorted(ends, before + most_bytes, side="right"))
            stop = min(max(stop, at + 1), at + MAX_ORDER_BLOCKS)
            yield at, stop
            at = stop

    def _advance(self, entry: _BlockRead, now: float) -> list[ReadEvent]:
        events: list[ReadEvent] = []
        if not entry.is_under_way:
            entry.progress_at = now
        if entry.piece is None and entry.waiting:
            entry.piece = TimedRead(self._clock(), self.pace(entry.peer).num_blocks)
        reason = self._settle(entry, list(entry.running), now)  # ended batches make room for the next
        if not reason and not entry.ended_early:
            reason = self._settle(entry, self._start_batches(entry), now)  # some transports copy before `read` returns
        if not reason and entry.is_under_way and now - entry.progress_at >= self._stall_s:
            reason = f"no part of it has come for {self._stall_s:g} s (transfer.stall_s)"
        if reason and not entry.ended_early:
            entry.ended_early = True
            events.append(ReadEvent(entry.receive, ReadOutcome.FAILED, reason))
        if entry.piece is not None:
            self._end_piece(entry, entry.piece)
        entry.releasing = [read for read in entry.releasing if not self._group.release(read)]
        if not entry.is_under_way and (entry.ended_early or entry.has_all):
            del self._entries[entry.receive]
            outcome = ReadOutcome.RELEASED if entry.ended_early else ReadOutcome.FINISHED
            events.append(ReadEvent(entry.receive, outcome))
        return events

    def _settle(self, entry: _BlockRead, reads: Sequence[ReadHandle], now: float) -> str:
        """Move those of the running `reads` that ended to `releasing`. Returns why one failed, or an empty string."""
        reason = ""
        for read in reads:
            state = self._group.poll(read)
            if state is ReadState.RUNNING:
                continue
            entry.progress_at = now
            batch = entry.running.pop(read)
            entry.releasing.append(read)
            if state is ReadState.FAILED:
                reason = self._group.reason(read)
                continue
            self.pace(entry.peer).ended(batch, self._timed(entry.peer), self._clock())
            if entry.num_to_come:
                self.num_early += batch.num_blocks
        return reason

    def _timed(self, peer: PeerHandle) -> list[TimedRead]:
        """Return the reads of a peer that are being timed, or have ended in this round."""
        timed = [entry.piece for entry in self._of(peer) if entry.piece is not None]
        return timed + self._ended.get(peer, [])

    def _end_piece(self, entry: _BlockRead, piece: TimedRead) -> None:
        """Record the time of a piece that has ended, or that has run for `MEASURED_S`."""
        pace, now = self.pace(entry.peer), self._clock()
        has_blocks, goes_on = pace.num_blocks > piece.blocks_before, bool(entry.running or entry.waiting)
        if goes_on and (not has_blocks or now - piece.began_s < MEASURED_S):
            return
        if has_blocks and not entry.ended_early:
            self._ended[entry.peer].append(piece)
        entry.piece = TimedRead(now, pace.num_blocks) if goes_on else None

    def _start_batches(self, entry: _BlockRead) -> list[ReadHandle]:
        started = []
        while entry.waiting and len(entry.running) < self._reads_in_flight:
            batch = entry.waiting.popleft()
            began_s = self._clock()  # some transports copy before `read` returns
            started.append(self._group.read(entry.peer, batch.source_blocks, batch.blocks))
            entry.running[started[-1]] = RunningBatch(self._num_in_first(batch.blocks), began_s)
        return started

    def _num_in_first(self, blocks: BlockNumbers) -> int:
        """Return how many of these blocks belong to the first cache group."""
        arenas = self._group.region.arenas
        return len(blocks) if len(arenas) == 1 else int(np.count_nonzero(blocks < arenas[0].num_blocks))

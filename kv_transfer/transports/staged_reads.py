"""The reader's side of staged reads: parts of reads, from the holder's buffers into ours, and on to their targets.

    part      waiting ──a buffer is free: Fill──> asked ──Filled──> reading ──> copying ──> done
                 ^                                  │
                 └──── no answer: its buffer is for the part of another holder, and it is asked for again

All buffers of a holder may be those of readers that have died. So a part is asked for again for longer than such
buffers are kept, until its holder has not answered for `PATIENCE_S`. Then all reads of this holder fail: they are
`FAILED` at once. Their parts that are being copied go on, and buffers that the network may still write to are not used
until it has ended.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .. import codec
from ..errors import TransportError
from . import ByteRange, PeerHandle, RangeTable, ReadHandle, ReadState
from .range_copies import RangeCopies
from .staged_buffers import BufferPool, starts_in_buffer
from .staged_messages import KEPT_S, MAX_RANGES, Fill, Filled, Free, HostNetwork, Open, ToReader, encode_ranges

logger = logging.getLogger(__name__)

MARGIN_S = 1.0  # before the holder may use a buffer for others
ASK_AGAIN_S = 4.0
# It is shorter than `transfer.stall_s`, so that a read begins again over another lane before it fails.
PATIENCE_S = KEPT_S + 2.0


class Remote:
    """A holder whose buffers we read."""

    def __init__(self, name: str, network: PeerHandle, buffer_bytes: int) -> None:
        self.name = name  # of its agent
        self.network = network
        self.buffer_bytes = buffer_bytes
        self.is_broken = False
        self.asked_at = -math.inf  # when we sent it the last `Fill`
        self.answered_at = -math.inf
        self.num_unanswered = 0  # parts that were asked for, also those that wait to be asked for again
        self.unanswered_since = math.inf  # when the first of them was asked for
        self.num_buffers = 0  # that parts of its reads have

    def asked(self, now: float) -> None:
        """Note that a part was asked for, for the first time."""
        if not self.num_unanswered:
            self.unanswered_since = now
        self.num_unanswered += 1

    def silent_s(self, now: float) -> float:
        """Return for how long it has not answered, although it was asked for parts."""
        return now - max(self.answered_at, self.unanswered_since) if self.num_unanswered else 0.0


@dataclasses.dataclass(slots=True, eq=False)
class StagedRead:
    """A read of some ranges."""

    remote: Remote
    num_left: int = 0  # parts that are not done
    num_writing: int = 0  # parts that are being copied to their targets
    state: ReadState = ReadState.RUNNING


class _Stage(enum.Enum):
    ASKED = enum.auto()
    READING = enum.auto()
    COPYING = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class _Part:
    read: StagedRead
    ranges: RangeTable  # offset in the peer's memory, address to copy to, bytes
    number: int = 0
    asked_at: float = 0.0
    is_unanswered: bool = False  # it was asked for
    buffer: int = 0
    stage: _Stage = _Stage.ASKED
    handle: Any = None  # of the network's read, then of the copy

    @property
    def num_bytes(self) -> int:
        return int(self.ranges[:, 2].sum())


class _EndedRead(NamedTuple):
    """A read of the network that nobody waits for any more, to be released."""

    remote: Remote
    handle: ReadHandle
    buffer: int | None  # to be freed then


class StagedReads:
    """All reads of one engine. `network` has registered the buffers."""

    def __init__(
        self,
        network: HostNetwork,
        buffers: BufferPool,
        copies: RangeCopies,
        clock: Callable[[], float],
    ) -> None:
        self._network = network
        self._buffers = buffers
        self._copies = copies
        self._clock = clock
        self._numbers = itertools.count(1)
        self._waiting: collections.deque[_Part] = collections.deque()
        self._parts: dict[int, _Part] = {}  # that have a buffer, by number
        self._ended: list[_EndedRead] = []

    @property
    def num_free(self) -> int:
        """The number of free buffers."""
        return self._buffers.num_free

    def begin(self, remote: Remote, table: RangeTable) -> StagedRead:
        """Begin to read `table`: rows of offset in the holder's memory, address to copy to, and number of bytes."""
        read = StagedRead(remote)
        for ranges in _parts(table, min(self._buffers.buffer_bytes, remote.buffer_bytes)):
            self._waiting.append(_Part(read, ranges))
            read.num_left += 1
        if not read.num_left:
            read.state = ReadState.DONE
        self._ask()
        return read

    def advance(self) -> None:
        """Advance all reads as far as the network and the device have got."""
        for part in list(self._parts.values()):
            self._advance(part)
        self._ended = [each for each in self._ended if not self._let_go(each)]
        self._ask()

    def uses_network(self, remote: Remote) -> bool:
        """Return whether the network has a read of this holder that is not released."""
        reading = (part.read.remote for part in self._parts.values() if part.stage is _Stage.READING)
        return remote in reading or any(ended.remote is remote for ended in self._ended)

    def _ask(self) -> None:
        """Ask for as many waiting parts as there are free buffers: next for one of the holder that has the fewest."""
        while self._waiting and self._buffers.num_free:
            part = min(self._waiting, key=lambda part: part.read.remote.num_buffers)
            self._waiting.remove(part)
            remote = part.read.remote
            remote.num_buffers += 1
            part.number, part.buffer, part.asked_at = next(self._numbers), self._buffers.take(), self._clock()
            if not part.is_unanswered:
                part.is_unanswered = True
                remote.asked(part.asked_at)
            part.stage = _Stage.ASKED
            self._parts[part.number] = part
            try:
                self._open(remote)
                fill = Fill(part.number, encode_ranges(part.ranges[:, [0, 2]]))
                self._network.send(remote.name, codec.encode(fill))
            except TransportError as error:
                self._fail(part.read, str(error))

    def _open(self, remote: Remote) -> None:
        """Say who we are to a holder that seems not to know us, or may have forgotten us since our last message."""
        now = self._clock()
        if now - remote.asked_at > KEPT_S / 2 or remote.silent_s(now) > ASK_AGAIN_S:
            self._network.send(remote.name, codec.encode(Open(self._network.metadata())))
        remote.asked_at = now

    def handle(self, sender: str, message: ToReader) -> None:
        """Take in a message. A buffer that nobody waits for is freed."""
        part = self._parts.get(message.number)
        if part is None or part.read.remote.name != sender or part.stage is not _Stage.ASKED:
            if isinstance(message, Filled):
                self._send(sender, Free(message.number))
            return
        part.read.remote.answered_at = self._clock()
        self._expect_no_answer(part)
        if isinstance(message, Filled):
            self._read_buffer(part, message.offset)
        else:
            self._fail(part.read, message.reason)

    def _read_buffer(self, part: _Part, offset: int) -> None:
        buffer = ByteRange(offset, self._buffers.offset(part.buffer), part.num_bytes)
        try:
            part.handle = self._network.read(part.read.remote.network, [buffer])
        except TransportError as error:
            self._fail(part.read, str(error))
            return
        part.stage = _Stage.READING

    def _advance(self, part: _Part) -> None:
        if part.number not in self._parts:  # given up in this round
            return
        match part.stage:
            case _Stage.ASKED:
                self._advance_asked(part)
            case _Stage.READING:
                self._advance_reading(part)
            case _Stage.COPYING:
                self._advance_copying(part)

    def _advance_asked(self, part: _Part) -> None:
        """Let other parts have the buffer of one that got no answer, unless its holder has been silent for too long."""
        now, remote = self._clock(), part.read.remote
        if remote.silent_s(now) > PATIENCE_S:
            self._fail(part.read, f"no buffer was filled within {PATIENCE_S:g} s")
        elif now - part.asked_at > ASK_AGAIN_S:
            self._send(remote.name, Free(part.number))
            self._drop(part)
            self._waiting.append(part)

    def _advance_reading(self, part: _Part) -> None:
        state = self._network.poll(part.handle)
        if state is ReadState.RUNNING:
            return
        if state is ReadState.FAILED or self._is_too_late(part):
            self._fail(part.read, "the network failed" if state is ReadState.FAILED else "a buffer came too late")
            return
        self._ended.append(_EndedRead(part.read.remote, part.handle, None))
        self._send(part.read.remote.name, Free(part.number))
        sources = self._buffers.address(part.buffer) + starts_in_buffer(part.ranges[:, 2])
        try:
            part.handle = self._copies.begin(np.column_stack((sources, part.ranges[:, 1:])))
        except RuntimeError as error:
            self._drop(part)
            self._fail(part.read, f"the device refuses a copy: {error}")
            return
        part.stage = _Stage.COPYING
        part.read.num_writing += 1

    def _advance_copying(self, part: _Part) -> None:
        try:
            if not self._copies.has_ended(part.handle):
                return
        except RuntimeError as error:  # nothing runs on this device any more
            logger.error("a copy to the GPU failed: %s", error)
            self._fail(part.read, "a copy failed")
        self._drop(part)
        part.read.num_writing -= 1
        part.read.num_left -= 1
        if not part.read.num_left and part.read.state is ReadState.RUNNING:
            part.read.state = ReadState.DONE

    def _is_too_late(self, part: _Part) -> bool:
        """Return whether the holder may use the part's buffer for others."""
        return self._clock() - part.asked_at > KEPT_S - MARGIN_S

    def _fail(self, read: StagedRead, reason: str) -> None:
        """Fail a read, and all others of its holder, which cannot be reached any more."""
        remote = read.remote
        logger.warning("staged reads of %s failed: %s", remote.name, reason)
        remote.is_broken = True
        parts = [*self._parts.values(), *self._waiting]
        for each in {read, *(part.read for part in parts if part.read.remote is remote)}:
            self.give_up(each)

    def give_up(self, read: StagedRead) -> None:
        """Fail a read. Parts of it that are being copied go on."""
        if read.state is ReadState.RUNNING:
            read.state = ReadState.FAILED
        for part in [part for part in (*self._parts.values(), *self._waiting) if part.read is read]:
            self._expect_no_answer(part)
        self._waiting = collections.deque(part for part in self._waiting if part.read is not read)
        for part in [part for part in self._parts.values() if part.read is read]:
            if part.stage is _Stage.READING:
                self._forget(part)
                self._ended.append(_EndedRead(read.remote, part.handle, part.buffer))
            elif part.stage is _Stage.ASKED:
                self._drop(part)
            if part.stage is not _Stage.COPYING:
                self._send(read.remote.name, Free(part.number))

    @staticmethod
    def _expect_no_answer(part: _Part) -> None:
        """Note that a part, if it was asked for, was answered or is given up."""
        part.read.remote.num_unanswered -= part.is_unanswered
        part.is_unanswered = False

    def _let_go(self, ended: _EndedRead) -> bool:
        """Release a read of the network. Then nothing can write into its buffer, which is freed if it is given."""
        if self._network.poll(ended.handle) is ReadState.RUNNING or not self._network.release(ended.handle):
            return False
        if ended.buffer is not None:
            self._buffers.give_back(ended.buffer)
        return True

    def _drop(self, part: _Part) -> None:
        self._forget(part)
        self._buffers.give_back(part.buffer)

    def _forget(self, part: _Part) -> None:
        del self._parts[part.number]
        part.read.remote.num_buffers -= 1

    def _send(self, name: str, message: msgspec.Struct) -> None:
        try:
            self._network.send(name, codec.encode(message))
        except TransportError as error:
            logger.info("%s gets no message: %s", name, error)


def _parts(table: RangeTable, buffer_bytes: int) -> Iterator[RangeTable]:
    """Divide ranges, long ones too, into tables of at most `buffer_bytes` and `MAX_RANGES` ranges each."""
    counts = -(-table[:, 2] // buffer_bytes)
    if (counts > 1).any():
        done = np.concatenate([np.arange(count) for count in counts]) * buffer_bytes
        table = np.repeat(table, counts, axis=0)
        table[:, :2] += done[:, None]
        table[:, 2] = np.minimum(table[:, 2] - done, buffer_bytes)
    ends, first = np.cumsum(table[:, 2]), 0
    while first < len(table):
        before = ends[first - 1] if first else 0
        last = int(np.searchsorted(ends, before + buffer_bytes, side="right"))
        last = min(last, first + MAX_RANGES)
        yield table[first:last]
        first = last

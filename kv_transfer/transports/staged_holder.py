"""The holder's side of staged reads: it copies ranges of its memory into bounce buffers, which readers read.

Fill ──> waits for a free buffer ──> copied ──Filled──> read by its reader ──Free, or late──> free

A buffer is used again `KEPT_S` after its reader asked for it, also if the reader has not freed it: it may have died.
The reader counts from when it sent the message, which is earlier, and does not use what it has read later than that. A
reader that is silent for as long is forgotten. Before it asks after a pause, or after no answer, it introduces itself
again.

What waits is bounded, so a reader that asks without end takes no more memory, and only its own reads fail: it has a
lane less, and reads over another. A reader asks for as many parts at once as it has buffers of its own, 8.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from .. import codec
from ..errors import MalformedMessage, TransportError
from . import Memory, RangeTable
from .common import check_ranges
from .range_copies import RangeCopies
from .staged_buffers import BufferPool, starts_in_buffer
from .staged_messages import (
    KEPT_S,
    Close,
    Fill,
    Filled,
    Free,
    HostNetwork,
    Open,
    Refused,
    ToHolder,
    ToReader,
    decode_ranges,
)

logger = logging.getLogger(__name__)

# `Fill`s that wait for a buffer: of one reader, and of all. Each takes at most 50 KB, all of them 100 MB.
MOST_WAITING_OF_READER: Final = 32
MOST_WAITING: Final = 2048

_Key = tuple[str, int]  # the reader's name, the number of its `Fill`


class _Waiting(NamedTuple):
    ranges: RangeTable  # offset in our memory, 0, number of bytes
    asked_at: float


class _Copying(NamedTuple):
    key: _Key
    buffer: int
    asked_at: float
    copy: Any


class _Filled(NamedTuple):
    buffer: int
    asked_at: float


class StagedHolder:
    """Fills buffers for readers. `network` has registered them."""

    def __init__(
        self,
        memory: Memory,
        network: HostNetwork,
        buffers: BufferPool,
        copies: RangeCopies,
        clock: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._network = network
        self._buffers = buffers
        self._copies = copies
        self._clock = clock
        self._heard_at: dict[str, float] = {}  # the readers, and when each sent its last message
        self._waiting: dict[_Key, _Waiting] = {}  # the oldest first
        self._num_waiting: collections.Counter[str] = collections.Counter()  # of each reader
        self._refused: set[str] = set()  # readers of whose refusal the log tells
        self._copying: list[_Copying] = []
        self._filled: dict[_Key, _Filled] = {}

    def handle(self, reader: str, message: ToHolder) -> None:
        """Take in a message. One of a reader that is not known, or no longer, changes nothing."""
        if isinstance(message, Open):
            self._open(reader, message)
            return
        if reader not in self._heard_at:
            return
        self._heard_at[reader] = self._clock()
        match message:
            case Fill():
                self._queue(reader, message)
            case Free():
                self._drop((reader, message.number))
            case Close():
                self._forget(reader)

    def advance(self) -> None:
        """Tell readers of buffers that have been filled, fill others, and forget readers and buffers that are late."""
        copying, self._copying = self._copying, []
        for each in copying:
            self._settle(each)
        now = self._clock()
        for reader in [name for name, heard_at in self._heard_at.items() if now - heard_at >= KEPT_S]:
            self._forget(reader)
        for key in [key for key, filled in self._filled.items() if now - filled.asked_at >= KEPT_S]:
            self._drop(key)
        while self._waiting and self._buffers.num_free:
            key = next(iter(self._waiting))
            self._fill(key, self._take_waiting(key))

    @property
    def num_free(self) -> int:
        """The number of free buffers."""
        return self._buffers.num_free

    def _open(self, reader: str, message: Open) -> None:
        if reader in self._heard_at:
            self._heard_at[reader] = self._clock()
            return
        try:
            name = self._network.add_agent(message.metadata)
        except (TransportError, MalformedMessage) as error:
            logger.warning("%s cannot be answered: %s", reader, error)
            return
        if name != reader:
            logger.warning("%s gave the metadata of %s", reader, name)
            self._network.remove_agent(name)
            return
        self._heard_at[reader] = self._clock()

    def _queue(self, reader: str, message: Fill) -> None:
        key = reader, message.number
        if key in self._waiting or key in self._filled or any(copying.key == key for copying in self._copying):
            return  # it is answered once
        if self._num_waiting[reader] >= MOST_WAITING_OF_READER or len(self._waiting) >= MOST_WAITING:
            self._refuse_to_wait(reader, message.number)
            return
        asked = decode_ranges(message.ranges)
        ranges = np.insert(asked, 1, 0, axis=1)
        try:
            check_ranges(ranges, self._buffers.buffer_bytes, self._memory.num_bytes, "this engine")
        except TransportError as error:
            self._answer(reader, Refused(message.number, str(error)))
            return
        if int(ranges[:, 2].sum()) > self._buffers.buffer_bytes:
            self._answer(reader, Refused(message.number, f"a buffer has {self._buffers.buffer_bytes} bytes"))
            return
        self._waiting[key] = _Waiting(ranges, self._clock())
        self._num_waiting[reader] += 1

    def _refuse_to_wait(self, reader: str, number: int) -> None:
        reason = (
            f"{self._num_waiting[reader]} of its parts and {len(self._waiting)} of all readers wait for a buffer, "
            f"at most {MOST_WAITING_OF_READER} and {MOST_WAITING} may"
        )
        if reader not in self._refused:
            self._refused.add(reader)
            logger.warning("%s asks for too much through pinned memory, and is refused: %s", reader, reason)
        self._answer(reader, Refused(number, reason))

    def _take_waiting(self, key: _Key) -> _Waiting:
        self._num_waiting[key[0]] -= 1
        return self._waiting.pop(key)

    def _fill(self, key: _Key, waiting: _Waiting) -> None:
        buffer = self._buffers.take()
        rows = waiting.ranges + np.array((self._memory.address, self._buffers.address(buffer), 0))
        rows[:, 1] += starts_in_buffer(waiting.ranges[:, 2])
        try:
            copy = self._copies.begin(rows)
        except RuntimeError as error:
            self._buffers.give_back(buffer)
            self._answer(key[0], Refused(key[1], f"the device refuses a copy: {error}"[:1000]))
            return
        self._copying.append(_Copying(key, buffer, waiting.asked_at, copy))

    def _settle(self, copying: _Copying) -> None:
        reader, number = copying.key
        try:
            if not self._copies.has_ended(copying.copy):
                self._copying.append(copying)
                return
        except RuntimeError as error:  # nothing runs on this device any more: the buffer is not used again
            self._answer(reader, Refused(number, f"a copy failed: {error}"[:1000]))
            return
        if reader not in self._heard_at:
            self._buffers.give_back(copying.buffer)
            return
        self._filled[copying.key] = _Filled(copying.buffer, copying.asked_at)
        self._answer(reader, Filled(number, self._buffers.offset(copying.buffer)))

    def _drop(self, key: _Key) -> None:
        filled = self._filled.pop(key, None)
        if filled is not None:
            self._buffers.give_back(filled.buffer)
        elif key in self._waiting:
            self._take_waiting(key)

    def _forget(self, reader: str) -> None:
        del self._heard_at[reader]
        for key in [key for key in (*self._waiting, *self._filled) if key[0] == reader]:
            self._drop(key)
        del self._num_waiting[reader]
        self._refused.discard(reader)
        self._network.remove_agent(reader)

    def _answer(self, reader: str, message: ToReader) -> None:
        try:
            self._network.send(reader, codec.encode(message))
        except TransportError as error:
            logger.info("%s is not answered: %s", reader, error)

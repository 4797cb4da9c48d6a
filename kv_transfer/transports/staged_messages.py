"""Messages of `StagedTransport`, between the reader and the holder of some memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from .. import codec
from ..codec import Id, Reason
from . import Transport

MAX_RANGES = 2048  # in one buffer, so that a message has at most 32 KB
RANGE_BYTES = 16
KEPT_S = 15.0  # after a reader has asked for a buffer, the holder uses it for others


class Open(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Introduces a reader, so that it can be answered: before its first `Fill`, after a pause, and after no answer."""

    metadata: Annotated[bytes, Meta(max_length=1 << 16)]  # of the network transport


class Fill(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Asks the holder to copy ranges of its memory into a bounce buffer, one after the other."""

    number: Id  # of this reader, never used again
    ranges: Annotated[bytes, Meta(min_length=RANGE_BYTES, max_length=MAX_RANGES * RANGE_BYTES)]  # int64 [n, 2]


class Free(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """The buffer of a `Fill` is no longer needed."""

    number: Id


class Close(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """The reader will not read any more."""


class Filled(msgspec.Struct, frozen=True, array_like=True, tag=24):
    number: Id
    offset: Id  # of the buffer in the memory that the holder's network transport has registered


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=25):
    number: Id
    reason: Reason


ToHolder = Open | Fill | Free | Close
ToReader = Filled | Refused

decode: Callable[[bytes], ToHolder | ToReader] = codec.decoder(ToHolder | ToReader, "a message of a staged read")


def encode_ranges(table: NDArray[np.int64]) -> bytes:
    """Encode rows of offset and number of bytes."""
    return np.ascontiguousarray(table, dtype="<i8").tobytes()


def decode_ranges(data: bytes) -> NDArray[np.int64]:
    """Return rows of offset and number of bytes. Trailing bytes that are no whole row are dropped."""
    whole = len(data) // RANGE_BYTES * RANGE_BYTES
    return np.frombuffer(data[:whole], dtype="<i8").astype(np.int64).reshape(-1, 2)


class HostNetwork(Transport, Protocol):
    """A transport of host memory that carries messages, too. Names are those of agents, as the library knows them."""

    def add_agent(self, metadata: bytes) -> str:
        """Return the name of the agent with this metadata, which can be sent messages until `remove_agent`.

        Raises `TransportError` or `MalformedMessage`.
        """
        ...

    def remove_agent(self, name: str) -> None: ...

    def send(self, name: str, message: bytes) -> None:
        """Send a message, or raise `TransportError`. It may get lost if the other end does."""
        ...

    def messages(self) -> list[tuple[str, bytes]]:
        """Return the messages that have come since the last call, each with its sender's name. Makes progress."""
        ...

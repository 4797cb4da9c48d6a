"""Transports: one-sided reads of another engine's memory. One thread uses a transport.

add_peer ──> CONNECTING ──> CONNECTED ──a read fails──> BROKEN ──> remove_peer (when no read of it is left)
read ──> RUNNING ──> DONE | FAILED ──> release (until it says that nothing can write any more)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

PeerHandle = int
ReadHandle = int


class ByteRange(NamedTuple):
    """One contiguous range to read; offsets count from the start of the peer's region and of ours."""

    remote: int
    local: int
    num_bytes: int


RangeTable = NDArray[np.int64]  # [n, 3]: a `ByteRange` a row
Ranges = Sequence[ByteRange] | RangeTable


class PeerState(enum.Enum):
    CONNECTING = enum.auto()
    CONNECTED = enum.auto()
    BROKEN = enum.auto()


class ReadState(enum.Enum):
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class Lane(msgspec.Struct, frozen=True):
    """The lane over which a peer's memory is read."""

    transport: str  # its name
    bytes_per_s: float | None  # of the few MB that are read when a peer is connected; None before, and if not measured
    is_slow: bool = False  # a GPU's memory travels so slowly that it probably goes through TCP


class Memory(Protocol):
    """A range of memory that a transport registers: an arena, or all of them."""

    @property
    def address(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        ...


class Transport(Protocol):
    """Reads byte ranges of peers' registered regions into our own, which was registered when the transport was made.

    Calls return at once, except that `read` may do its copying before it returns (shared memory works like that).
    Faults of a peer become a state or a `TransportError`.
    """

    name: str  # must be the same at both ends, such as `nixl/UCX`

    @property
    def num_fallbacks(self) -> int:
        """Reads that failed in one way and were begun again in another."""
        ...

    def metadata(self) -> bytes:
        """Return what a peer's `add_peer` needs to read our region."""
        ...

    def add_peer(self, metadata: bytes) -> PeerHandle:
        """Begin to connect. Raises `TransportError` for invalid metadata."""
        ...

    def peer_state(self, peer: PeerHandle) -> PeerState: ...

    def lane(self, peer: PeerHandle) -> Lane | None:
        """Return the lane of a read of this peer now; None if it is not connected."""
        ...

    def remove_peer(self, peer: PeerHandle) -> None:
        """Forget a peer of which no read is left."""
        ...

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        """Begin to read. Raises `TransportError` for ranges outside the regions; nothing was started then."""
        ...

    def poll(self, read: ReadHandle) -> ReadState: ...

    def release(self, read: ReadHandle) -> bool:
        """Forget a read that is DONE or FAILED. Returns False while it may still write into our region."""
        ...

    def progress(self) -> None:
        """Serve peers that read our memory over lanes that need our CPU, as TCP does."""
        ...

    def close(self) -> None: ...


class FileTransport(Protocol):
    """Reads and writes byte ranges of one file, as a `Transport` does with a peer's memory.

    `remote` of a range counts from the start of the file, `local` from the start of the memory that was registered when
    the transport was made.
    """

    def read(self, ranges: Ranges) -> ReadHandle:
        """Begin to read. Raises `TransportError` if nothing was started."""
        ...

    def write(self, ranges: Ranges) -> ReadHandle:
        """Begin to write. Raises `TransportError` if nothing was started."""
        ...

    def poll(self, handle: ReadHandle) -> ReadState: ...

    def release(self, handle: ReadHandle) -> bool:
        """Forget a transfer that is DONE or FAILED. Returns False while it may still run."""
        ...

    def close(self) -> None: ...

"""Transports: one-sided reads of another engine's memory. One thread uses a transport.

add_peer ──> CONNECTING ──> CONNECTED ──a read fails──> BROKEN ──> remove_peer (once no read of it is left)
read ──> RUNNING ──> DONE | FAILED ──> release (call it until it returns True: then nothing can write any more)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..codec import Name

PeerHandle = int
ReadHandle = int


class ByteRange(NamedTuple):
    """One contiguous range to read. `remote` and `local` are offsets in the peer's region and in ours."""

    remote: int
    local: int
    num_bytes: int


RangeTable = NDArray[np.int64]  # [n, 3], each row a `ByteRange`
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

    transport: Name
    bytes_per_s: float | None  # measured with a few MB when the peer is connected; None: not measured
    is_slow: bool = False  # GPU memory comes so slowly that it probably goes through TCP
    is_staged: bool = False  # GPU memory goes through pinned memory of both hosts


def slowest(lanes: Iterable[Lane | None]) -> Lane | None:
    """Return the slowest of the lanes that there are, an unmeasured one first. None: there is none."""
    known = [lane for lane in lanes if lane is not None]
    return min(known, key=lambda lane: (not lane.is_slow, lane.bytes_per_s or 0.0), default=None)


class Memory(Protocol):
    """A range of memory that a transport registers: one arena, or a region with all arenas."""

    @property
    def address(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        ...


class Transport(Protocol):
    """Reads byte ranges of peers' regions into our own region. The constructor registers our region.

    Calls return at once, except that `read` may copy before it returns, as over shared memory. Faults of a peer become
    a state or a `TransportError`.
    """

    name: str  # must be the same at both ends, such as `nixl/UCX`

    @property
    def num_fallbacks(self) -> int:
        """Number of reads that failed over one transport and began again over another."""
        ...

    def metadata(self) -> bytes:
        """Return the metadata with which a peer's `add_peer` connects to our region."""
        ...

    def add_peer(self, metadata: bytes) -> PeerHandle:
        """Begin to connect. Raises `TransportError` for invalid metadata."""
        ...

    def peer_state(self, peer: PeerHandle) -> PeerState: ...

    def lane(self, peer: PeerHandle) -> Lane | None:
        """Return the lane that a read of this peer would use now. None: it is not connected."""
        ...

    def remove_peer(self, peer: PeerHandle) -> None:
        """Forget a peer. No read of it may be left."""
        ...

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        """Begin to read. Raises `TransportError` for ranges outside the regions, and then has started nothing."""
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

    `remote` of a range is an offset in the file, `local` one in the memory that the constructor registered.
    """

    def read(self, ranges: Ranges) -> ReadHandle:
        """Begin to read. If it raises `TransportError`, nothing was started."""
        ...

    def write(self, ranges: Ranges) -> ReadHandle:
        """Begin to write. If it raises `TransportError`, nothing was started."""
        ...

    def poll(self, handle: ReadHandle) -> ReadState: ...

    def release(self, handle: ReadHandle) -> bool:
        """Forget a transfer that is DONE or FAILED. Returns False while it may still run."""
        ...

    def close(self) -> None: ...

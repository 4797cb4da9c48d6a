"""The bounce buffers of staged reads: pinned memory that a network has registered, and which buffers are free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..host_memory import HostMemory
from . import RangeTable

BOUNCE_BYTES = 4 << 20  # 3 ms at 10 Gbit/s
NUM_BUFFERS = 8  # for our own reads, and as many for those of peers


class BufferPool:
    """Buffers of equal size, one behind the other, that are taken and given back."""

    def __init__(self, memory: HostMemory, first: int, count: int) -> None:
        """Create it for `count` slots of `memory` from number `first` on."""
        self.buffer_bytes = memory.slot_bytes
        self._memory = memory
        self._free = list(range(first, first + count))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take a free buffer; there must be one."""
        return self._free.pop()

    def give_back(self, buffer: int) -> None:
        self._free.append(buffer)

    def offset(self, buffer: int) -> int:
        """Return where the buffer begins in the memory that the network has registered."""
        return buffer * self.buffer_bytes

    def address(self, buffer: int) -> int:
        return self._memory.address + self.offset(buffer)


@dataclass(frozen=True)
class BounceBuffers:
    """Host memory as a `Memory` for the network: buffers for peers' reads first, then those for our own."""

    memory: HostMemory

    @property
    def address(self) -> int:
        return self.memory.address

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def buffer_bytes(self) -> int:
        return self.memory.slot_bytes

    @classmethod
    def allocate(cls, device: str, buffer_bytes: int = BOUNCE_BYTES, num_buffers: int = NUM_BUFFERS) -> BounceBuffers:
        """Allocate memory, pinned if `device` is a GPU. Raises `TransportError`."""
        return cls(HostMemory(2 * num_buffers, buffer_bytes, device))

    def of_peers(self) -> BufferPool:
        return BufferPool(self.memory, 0, self.memory.num_slots // 2)

    def own(self) -> BufferPool:
        half = self.memory.num_slots // 2
        return BufferPool(self.memory, half, half)


def starts_in_buffer(num_bytes: RangeTable) -> RangeTable:
    """Return where ranges of these sizes begin that lie in a buffer one behind the other."""
    return np.concatenate(([0], np.cumsum(num_bytes[:-1])))

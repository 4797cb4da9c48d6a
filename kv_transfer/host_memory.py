"""Memory of the host in slots of one block each, and copies between it and an engine's blocks.

Copies are over when a call returns, and run beside the engine's steps: on a GPU in a stream of their own. One thread
uses a `Copies`.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from typing import Protocol

from baton.engine.core.layout import KVRegion

from .device_blocks import device_blocks
from .errors import TransportError
from .transports.memory import use_device

Pair = tuple[int, int]  # a block of the engine's, a slot


class HostMemory:
    """`num_slots` slots of `slot_bytes`, beginning on a page. Pinned where the blocks are a GPU's.

    Raises `TransportError` for memory that cannot be pinned.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: str) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_bytes = num_slots * slot_bytes
        self._owner = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._owner))
        if use_device(device) is not None:  # otherwise no page of it is taken before it is used
            _pin(self.address, self.num_bytes)
            weakref.finalize(self, _unpin, self.address, self._owner).atexit = False

    def view(self, slot: int) -> memoryview:
        """The slot's bytes."""
        array = (ctypes.c_char * self.slot_bytes).from_address(self.address + slot * self.slot_bytes)
        return memoryview(array).cast("B")


def _pin(address: int, num_bytes: int) -> None:
    """Not by torch's `pin_memory`, which rounds up to a power of two."""
    import torch

    for_all_contexts = 1
    failure = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, for_all_contexts))
    if failure:
        raise TransportError(
            f"{num_bytes} bytes of the host's memory cannot be pinned (CUDA error {failure}):"
            " give less (kv_tiers.host_bytes, transfer.buffer_bytes), or allow more (ulimit -l)"
        )


def _unpin(address: int, owner: mmap.mmap) -> None:
    """`owner` is kept until here."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)


class Copies(Protocol):
    def down(self, pairs: Sequence[Pair]) -> None:
        """Blocks into slots."""
        ...

    def up(self, pairs: Sequence[Pair]) -> None:
        """Slots into blocks."""
        ...


def open_copies(region: KVRegion, memory: HostMemory) -> Copies:
    """For the calling thread. Raises `TransportError` for a device that nothing is known of."""
    return _CpuCopies(region, memory) if use_device(region.device) is None else _CudaCopies(region, memory)


class _CpuCopies:
    def __init__(self, region: KVRegion, memory: HostMemory) -> None:
        self._region = region
        self._memory = memory

    def down(self, pairs: Sequence[Pair]) -> None:
        size = self._region.block_bytes
        for block, slot in pairs:
            ctypes.memmove(self._memory.address + slot * size, self._region.address + block * size, size)

    def up(self, pairs: Sequence[Pair]) -> None:
        size = self._region.block_bytes
        for block, slot in pairs:
            ctypes.memmove(self._region.address + block * size, self._memory.address + slot * size, size)


class _CudaCopies:
    def __init__(self, region: KVRegion, memory: HostMemory) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream(region.device)
        self._blocks = device_blocks(region)
        whole = (ctypes.c_char * memory.num_bytes).from_address(memory.address)
        self._slots = torch.frombuffer(whole, dtype=torch.uint8).view(memory.num_slots, -1)
        self._memory = memory

    def down(self, pairs: Sequence[Pair]) -> None:
        with self._torch.cuda.stream(self._stream):
            for block, slot in pairs:
                self._slots[slot].copy_(self._blocks[block], non_blocking=True)
        self._stream.synchronize()

    def up(self, pairs: Sequence[Pair]) -> None:
        with self._torch.cuda.stream(self._stream):
            for block, slot in pairs:
                self._blocks[block].copy_(self._slots[slot], non_blocking=True)
        self._stream.synchronize()

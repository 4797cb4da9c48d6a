"""Slots of equal size in host memory, for blocks or parts of reads; pinned if they are for a GPU."""

from __future__ import annotations

import ctypes
import mmap
import weakref

from .devices import use_device
from .errors import TransportError


class HostSlots:
    """`num_slots` slots of `slot_bytes` from `address` on, in memory that `owner` keeps alive."""

    def __init__(self, address: int, num_slots: int, slot_bytes: int, owner: object) -> None:
        self.address = address
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_bytes = num_slots * slot_bytes
        self._owner = owner

    def view(self, slot: int) -> memoryview:
        """Return the slot's bytes."""
        array = (ctypes.c_char * self.slot_bytes).from_address(self.address + slot * self.slot_bytes)
        return memoryview(array).cast("B")


class HostMemory(HostSlots):
    """Slots in newly allocated memory, aligned to a page, and pinned if the blocks are on a GPU.

    Raises `TransportError` if the memory cannot be allocated or pinned.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: str) -> None:
        owner = _allocate(num_slots * slot_bytes)
        super().__init__(ctypes.addressof(ctypes.c_char.from_buffer(owner)), num_slots, slot_bytes, owner)
        if use_device(device) is not None:  # without pinning, the kernel allocates a page when it is first used
            _pin(self.address, self.num_bytes)
            weakref.finalize(self, _unpin, self.address, owner).atexit = False


def _allocate(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise TransportError(
            f"the host does not have {num_bytes} bytes of memory ({error}):"
            " give less (kv_tiers.host_bytes, transfer.buffer_bytes)"
        ) from error


def _pin(address: int, num_bytes: int) -> None:
    """Pin memory without torch's `pin_memory`, which rounds up to a power of two."""
    import torch

    for_all_contexts = 1
    failure = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, for_all_contexts))
    if failure:
        raise TransportError(
            f"{num_bytes} bytes of the host's memory cannot be pinned (CUDA error {failure}):"
            " give less (kv_tiers.host_bytes, transfer.buffer_bytes), or allow more (ulimit -l)"
        )


def _unpin(address: int, owner: mmap.mmap) -> None:
    """Unpin memory, which `owner` keeps allocated until then."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)

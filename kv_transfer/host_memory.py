"""Memory of the host, in slots of one block each."""

from __future__ import annotations

import ctypes
import mmap
import weakref

from .errors import TransportError
from .transports.common import use_device


class HostMemory:
    """`num_slots` slots of `slot_bytes`, aligned to a page; pinned where the blocks are on a GPU.

    Raises `TransportError` for memory that cannot be allocated or pinned.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: str) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_bytes = num_slots * slot_bytes
        self._owner = _allocate(self.num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._owner))
        if use_device(device) is not None:  # otherwise no page is taken before it is used
            _pin(self.address, self.num_bytes)
            weakref.finalize(self, _unpin, self.address, self._owner).atexit = False

    def view(self, slot: int) -> memoryview:
        """Return the slot's bytes."""
        array = (ctypes.c_char * self.slot_bytes).from_address(self.address + slot * self.slot_bytes)
        return memoryview(array).cast("B")


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
    """Unpin memory that `owner` has kept allocated until now."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)

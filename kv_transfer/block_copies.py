"""Copies between an engine's blocks and slots in host memory, beside the engine's steps."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from baton.engine.core.regions import ArenaRegion

from .devices import use_device
from .errors import TransportError
from .host_memory import HostSlots

if TYPE_CHECKING:
    from torch import Tensor


CUDA_BATCH = 256  # copies that are enqueued before a wait for their end: the driver can queue as many

SlotPair = tuple[int, int]  # a block of the engine's, a slot
CopyRange = tuple[int, int, int]  # to, from, bytes


class BlockCopier(Protocol):
    """Copies between blocks and slots. A copy is done when the call returns. One thread uses it."""

    def down(self, pairs: Sequence[SlotPair]) -> None:
        """Copy blocks into slots."""
        ...

    def up(self, pairs: Sequence[SlotPair]) -> None:
        """Copy slots into blocks."""
        ...


def open_block_copier(region: ArenaRegion, memory: HostSlots) -> BlockCopier:
    """Make a copier for the calling thread. Raises `TransportError` for an unknown kind of device."""
    return _CpuBlockCopier(region, memory) if use_device(region.device) is None else _CudaBlockCopier(region, memory)


class CopyRun(NamedTuple):
    """Neighbouring blocks in neighbouring slots, which are one copy."""

    block: int
    slot: int
    length: int


def copy_runs(pairs: Sequence[SlotPair]) -> list[CopyRun]:
    """Join neighbouring pairs to runs, in order."""
    runs: list[CopyRun] = []
    for block, slot in pairs:
        last = runs[-1] if runs else None
        if last is not None and (block, slot) == (last.block + last.length, last.slot + last.length):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(CopyRun(block, slot, 1))
    return runs


class _CpuBlockCopier:
    """Copies all runs in one call of torch, since each call may wait for the GIL, which a step loop keeps busy."""

    def __init__(self, region: ArenaRegion, memory: HostSlots) -> None:
        import torch

        self._copy = torch._foreach_copy_
        self._blocks = device_blocks(region)
        whole = (ctypes.c_char * memory.num_bytes).from_address(memory.address)
        self._slots = torch.frombuffer(whole, dtype=torch.uint8).view(memory.num_slots, -1)
        self._memory = memory

    def down(self, pairs: Sequence[SlotPair]) -> None:
        if runs := copy_runs(pairs):
            self._copy(self._slot_views(runs), self._block_views(runs))

    def up(self, pairs: Sequence[SlotPair]) -> None:
        if runs := copy_runs(pairs):
            self._copy(self._block_views(runs), self._slot_views(runs))

    def _block_views(self, runs: Sequence[CopyRun]) -> list[Tensor]:
        return [self._blocks[run.block : run.block + run.length] for run in runs]

    def _slot_views(self, runs: Sequence[CopyRun]) -> list[Tensor]:
        return [self._slots[run.slot : run.slot + run.length] for run in runs]


class _CudaBlockCopier:
    def __init__(self, region: ArenaRegion, memory: HostSlots) -> None:
        self._blocks, self._slots, self._size = region.address, memory.address, region.block_bytes
        self._driver = _CudaCopies(region)
        self._memory = memory

    def down(self, pairs: Sequence[SlotPair]) -> None:
        self._driver.copy([(at_host, at_gpu, size) for at_gpu, at_host, size in self._ranges(pairs)])

    def up(self, pairs: Sequence[SlotPair]) -> None:
        self._driver.copy([(at_gpu, at_host, size) for at_gpu, at_host, size in self._ranges(pairs)])

    def _ranges(self, pairs: Sequence[SlotPair]) -> list[tuple[int, int, int]]:
        size = self._size
        return [
            (self._blocks + run.block * size, self._slots + run.slot * size, run.length * size)
            for run in copy_runs(pairs)
        ]


class _CudaCopies:
    """Copies byte ranges in a CUDA stream of its own. One thread uses it, whose current device is the region's.

    A call of torch, or of a library through ctypes, releases the GIL, and a busy step loop then keeps it for
    milliseconds, in which a link moves a hundred blocks. So we enqueue the copies of a batch by calls that take
    microseconds and keep the GIL (`ctypes.PyDLL`), and release it only to wait for their end.
    """

    def __init__(self, region: ArenaRegion) -> None:
        import torch

        self._stream = torch.cuda.Stream(region.device)
        self._handle = int(self._stream.cuda_stream)
        self._copy_async = _copy_async()

    def copy(self, ranges: Sequence[CopyRange]) -> None:
        """Copy the ranges and wait for the end. Raises `TransportError` for a copy that the driver refuses."""
        copy_async, handle = self._copy_async, self._handle
        for start in range(0, len(ranges), CUDA_BATCH):
            failed = 0
            for target, source, num_bytes in ranges[start : start + CUDA_BATCH]:
                failed = failed or copy_async(target, source, num_bytes, handle)
            self._stream.synchronize()
            if failed:
                raise TransportError(f"the CUDA driver refuses a copy between blocks and the host's memory: {failed}")


@functools.cache
def _copy_async() -> ctypes._NamedFuncPointer:
    function = ctypes.PyDLL("libcuda.so.1").cuMemcpyAsync
    function.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function


def device_blocks(region: ArenaRegion) -> Tensor:
    """Return the region as a uint8 tensor [num_blocks, block_bytes] of the same memory, which must outlive it."""
    import torch

    if region.device == "cpu":
        whole = (ctypes.c_char * region.num_bytes).from_address(region.address)
        return torch.frombuffer(whole, dtype=torch.uint8).view(region.num_blocks, region.block_bytes)
    return torch.as_tensor(_CudaArray(region), device=region.device)


class _CudaArray:
    """A region on a GPU as an array that torch uses without a copy (`__cuda_array_interface__`)."""

    def __init__(self, region: ArenaRegion) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.num_blocks, region.block_bytes),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }

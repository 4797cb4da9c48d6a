"""Copies of byte ranges within one process, on a GPU and from or to pinned host memory, beside the engine's steps."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from . import RangeTable

if TYPE_CHECKING:
    import torch

LONG_RANGE_BYTES = 16 << 20  # from this average length on, ranges are copied one by one, shorter ones by one kernel
ALIGNMENT = 16  # bytes; `kernels.block_copy.gpu` requires it of addresses and lengths


class RangeCopies(Protocol):
    """Copies ranges, rows of source address, target address and number of bytes. One thread uses it."""

    def begin(self, pieces: RangeTable) -> Any:
        """Begin to copy. Raises `RuntimeError` if the device refuses, and then nothing is being copied."""
        ...

    def has_ended(self, copy: Any) -> bool:
        """Return whether a copy has ended. Do not ask again once it has. Raises `RuntimeError` for a device's error."""
        ...

    def wait(self) -> None:
        """Return when all copies have ended."""
        ...


class GpuCopy(NamedTuple):
    """A copy that has begun."""

    ended: torch.cuda.Event
    table: torch.Tensor | None  # table of ranges that the kernel reads


class GpuCopies:
    """`RangeCopies` in a CUDA stream of its own, on the device that is current."""

    def __init__(self, device: int) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)
        self._tables: dict[int, list[torch.Tensor]] = {}  # free pinned tables, by their length

    def begin(self, pieces: RangeTable) -> GpuCopy:
        if pieces[:, 2].sum() >= LONG_RANGE_BYTES * len(pieces) or np.bitwise_or.reduce(pieces, axis=None) % ALIGNMENT:
            return self._copy_one_by_one(pieces)
        return self.launch(pieces)

    def launch(self, pieces: RangeTable) -> GpuCopy:
        """Copy all ranges by one kernel. Addresses and lengths must be multiples of `ALIGNMENT`."""
        import torch

        from baton.kernels.block_copy.gpu import copy_ranges

        table = self._table(pieces)
        with torch.cuda.stream(self.stream):
            copy_ranges(table, len(pieces))
        return GpuCopy(self._mark(), table)

    def compile(self, source: int, target: int) -> None:
        """Run the kernel once, on a few bytes at these addresses, so that no hand-off waits for its compilation."""
        piece = (source, target, ALIGNMENT)
        self.launch(np.array((piece, piece), dtype=np.int64)).ended.synchronize()

    def has_ended(self, copy: GpuCopy) -> bool:
        if not copy.ended.query():
            return False
        if copy.table is not None:
            self._tables.setdefault(len(copy.table), []).append(copy.table)
        return True

    def wait(self) -> None:
        self.stream.synchronize()

    def _copy_one_by_one(self, pieces: RangeTable) -> GpuCopy:
        from baton.kernels.p2p.cuda_ipc import DriverError, copy_async

        try:
            for source, target, num_bytes in pieces.tolist():
                copy_async(target, source, num_bytes, int(self.stream.cuda_stream))
        except DriverError as error:
            self.wait()  # for the copies before it, since the caller takes none to be running
            raise RuntimeError(str(error)) from error
        return GpuCopy(self._mark(), None)

    def _mark(self) -> torch.cuda.Event:
        import torch

        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def _table(self, pieces: RangeTable) -> torch.Tensor:
        """Return the ranges in a pinned table, whose length is rounded up to a power of two."""
        import torch

        length = 1 << (len(pieces) - 1).bit_length()
        spare = self._tables.get(length)
        table = spare.pop() if spare else torch.empty((length, 3), dtype=torch.int64, pin_memory=True)
        table.numpy()[: len(pieces)] = pieces
        return table


class HostCopies:
    """`RangeCopies` between parts of host memory, which have ended when `begin` returns."""

    def begin(self, pieces: RangeTable) -> None:
        for source, target, num_bytes in pieces.tolist():
            ctypes.memmove(target, source, num_bytes)

    def has_ended(self, copy: None) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""

"""Copies between a GPU's blocks and pinned memory, by the driver itself.

Whoever calls torch, or a library through ctypes, gives Python's interpreter away for that call, and a busy step loop
keeps it for milliseconds, in which a link moves a hundred blocks. So the copies of a batch are asked for by calls that
do not give it away, of microseconds each, and only their end is waited for without it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from baton.engine.core.layout import KVRegion

from ..errors import TransportError

BATCH = 256  # copies that are asked for before their end is waited for: the driver takes so many at once
Range = tuple[int, int, int]  # to, from, bytes


class CudaCopies:
    """For one thread, whose device is that of the region. In a stream of its own, beside the steps."""

    def __init__(self, region: KVRegion) -> None:
        import torch

        self._stream = torch.cuda.Stream(region.device)
        self._handle = int(self._stream.cuda_stream)
        self._copy_async = _copy_async()

    def copy(self, ranges: Sequence[Range]) -> None:
        """Over when it returns. Raises `TransportError` for what the driver refuses."""
        copy_async, handle = self._copy_async, self._handle
        for start in range(0, len(ranges), BATCH):
            failed = 0
            for target, source, num_bytes in ranges[start : start + BATCH]:
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

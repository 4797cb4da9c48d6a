"""The stream, events, pinned memory and graphs of a GPU.

Everything else (allocation, kernels, copies) goes through torch and Triton, which put their work into the current
stream. So with a `Stream` whose work is done when a call returns, the whole CUDA backend runs on a CPU; tests use this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..outputs import Event


class Stream(Protocol):
    device: torch.device

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which work goes into this stream."""
        ...

    def event(self) -> Event: ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeros in host memory that the device can read and write in place."""
        ...

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record the kernels that `work` launches. The result launches them again, with the same addresses."""
        ...

    def synchronize(self) -> None:
        """Wait for all work so far, in other streams, too."""
        ...

    def release(self) -> None:
        """Release all captured graphs, which must not be called afterwards."""
        ...


class CudaStream:
    """A CUDA stream. Its graphs share one memory pool, so capture the largest first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def event(self) -> Event:
        return torch.cuda.Event()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would collect garbage and empty caches each time, which takes longer than the capture.
        with self.current():
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                work()
            finally:
                graph.capture_end()
        self._graphs.add(graph)
        replay: Callable[[], object] = graph.replay
        return replay

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        for graph in self._graphs:
            graph.reset()

"""Copies of byte ranges on a GPU, with a stand-in for its driver."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from baton.kernels.p2p import cuda_ipc
from baton.kv_transfer.transports.range_copies import GpuCopies


class Driver:
    """Copies when its stream is waited for, and refuses all copies from the third on."""

    def __init__(self, device: int) -> None:
        self.cuda_stream = device
        self.queued: list[tuple[int, int, int]] = []

    def copy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        if len(self.queued) == 2:
            raise cuda_ipc.DriverError("cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE")
        self.queued.append((target, source, num_bytes))

    def synchronize(self) -> None:
        while self.queued:
            ctypes.memmove(*self.queued.pop(0))


def test_when_a_copy_is_refused_those_before_it_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may use their targets for something else at once."""
    driver = Driver(0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: driver)
    monkeypatch.setattr(cuda_ipc, "copy_async", driver.copy_async)
    source, target = np.arange(3, dtype=np.uint8), np.full(3, 0xEE, dtype=np.uint8)
    pieces = [(source.ctypes.data + at, target.ctypes.data + at, 1) for at in range(3)]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        GpuCopies(0).begin(np.array(pieces, dtype=np.int64))
    assert driver.queued == []
    assert target.tolist() == [0, 1, 0xEE]

"""CUDA IPC that cannot be used between two engines of a machine: a line says why, and all bytes arrive over NIXL.

Host memory stands in for a GPU's, and a stand-in for the driver maps it. What a real driver does is in
`test_cuda_ipc.py`.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import baton.kernels.p2p.cuda_ipc as driver
from baton.kernels.p2p.cuda_ipc import DriverError
from baton.kv_transfer.settings import TransferSettings
from baton.kv_transfer.transports import (
    Lane,
    PeerState,
    RangeTable,
    ReadState,
    Transport,
    cuda_ipc,
    fastest,
    nixl,
    opening,
)
from baton.kv_transfer.transports.common import make_scratch
from baton.kv_transfer.transports.opening import open_transport

SIZE = 16 << 20
SETTINGS = TransferSettings(cpu_affinity="any", buffer="device")


class Driver:
    """A stand-in for the driver and for copies by a GPU. Memory of a process is opened as itself."""

    def __init__(self) -> None:
        self.shares = True
        self.refusal = ""  # of opening
        self.opens_other_memory = False
        self.other = np.zeros(SIZE, dtype=np.uint8)
        self.stream = None
        self.elapsed_ms = itertools.cycle((1e-3, 1.0))

    def shared_handle(self, address: int) -> tuple[bytes, int]:
        if not self.shares:
            raise DriverError("cuIpcGetMemHandle gave CUDA_ERROR_INVALID_VALUE")
        return address.to_bytes(8, "little").ljust(64, b"\0"), 0

    def open(self, handle: bytes) -> SimpleNamespace:
        if self.refusal:
            raise DriverError(f"cuIpcOpenMemHandle_v2 gave {self.refusal}")
        address = self.other.ctypes.data if self.opens_other_memory else int.from_bytes(handle[:8], "little")
        return SimpleNamespace(address=address, num_bytes=lambda: SIZE, free=lambda: None)

    def compile(self, source: int, target: int) -> None: ...

    def launch(self, pieces: RangeTable) -> None:
        for source, target, num_bytes in pieces.tolist():
            ctypes.memmove(target, source, num_bytes)

    begin = launch

    def has_ended(self, copy: None) -> bool:
        return True

    def wait(self) -> None: ...

    def event(self, *, enable_timing: bool) -> SimpleNamespace:
        return SimpleNamespace(
            record=lambda stream: None, query=lambda: True, elapsed_time=lambda later: next(self.elapsed_ms)
        )


class Gpu:
    """Host memory that calls itself a GPU's."""

    device = "cuda:0"

    def __init__(self, seed: int) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
        self.address, self.num_bytes = self.bytes.ctypes.data, SIZE


@pytest.fixture
def gpu_driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(driver, "shared_handle", made.shared_handle)
    monkeypatch.setattr(driver, "DeviceMemory", made)
    monkeypatch.setattr(cuda_ipc, "GpuCopies", lambda device: made)
    monkeypatch.setattr(cuda_ipc, "use_device", lambda device: 0)
    for module in (nixl, opening):
        monkeypatch.setattr(module, "use_device", lambda device: None)
    monkeypatch.setattr(nixl, "make_scratch", lambda device: make_scratch("cpu"))
    monkeypatch.setattr(fastest, "SLOW_GPU_BYTES_PER_S", 1e18)  # whatever NIXL reaches here
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **options: empty(*size, **options))
    monkeypatch.setattr(torch, "empty_like", lambda other: empty_like(other))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    return made


class Pair:
    def __init__(self) -> None:
        self.theirs, self.ours = Gpu(1), Gpu(2)
        self.opened: list[Transport] = []

    def open(self, region: Gpu, name: str) -> Transport:
        self.opened.append(open_transport(SETTINGS, region, name))
        return self.opened[-1]

    def read_all(self) -> Lane | None:
        """Connect the reader, read all of the holder's memory, and return the lane. The holder was opened first."""
        holder, reader = self.opened
        peer = reader.add_peer(holder.metadata())
        end = time.monotonic() + 20
        while reader.peer_state(peer) is PeerState.CONNECTING:
            holder.progress()
            assert time.monotonic() < end
        read = reader.read(peer, [(0, 0, SIZE)])
        while (state := reader.poll(read)) is ReadState.RUNNING:
            holder.progress()
            assert time.monotonic() < end
        assert state is ReadState.DONE
        assert np.array_equal(self.theirs.bytes, self.ours.bytes)
        lane = reader.lane(peer)
        assert reader.release(read)
        return lane


@pytest.fixture
def pair(gpu_driver: Driver) -> Iterator[Pair]:
    made = Pair()
    yield made
    for transport in reversed(made.opened):
        transport.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def check_lane(pair: Pair, transport: str) -> None:
    """Open both ends, read all blocks, and check which way they went."""
    pair.open(pair.theirs, "holder")
    pair.open(pair.ours, "reader")
    lane = pair.read_all()
    assert lane is not None
    assert lane.transport == transport


def test_without_a_fault_blocks_are_mapped(pair: Pair) -> None:
    check_lane(pair, "cuda_ipc")


@pytest.mark.parametrize(("end", "who"), [("holder", "it"), ("reader", "this engine")])
def test_ends_that_disagree_about_cuda_ipc(
    end: str, who: str, pair: Pair, gpu_driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    for name, region in (("holder", pair.theirs), ("reader", pair.ours)):
        gpu_driver.shares = name != end
        pair.open(region, name)
    lane = pair.read_all()
    assert lane is not None
    assert lane.transport == "nixl/UCX"
    at_start, at_pairing = warnings(caplog)
    assert "read each other over the network: the GPU's memory cannot be shared with other processes" in at_start
    assert "GPU memory of holder is read slowly, probably through TCP: nixl/UCX" in at_pairing
    assert f"not directly: {who} shares no memory with other processes" in at_pairing


@pytest.mark.parametrize("error", ["CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_MAP_FAILED", "CUDA_ERROR_INVALID_CONTEXT"])
def test_a_handle_of_a_dead_process_or_of_another_container(
    error: str, pair: Pair, gpu_driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    gpu_driver.refusal = error
    check_lane(pair, "nixl/UCX")
    (told,) = warnings(caplog)
    assert (
        f"not directly: its memory cannot be mapped (cuIpcOpenMemHandle_v2 gave {error}): its process has ended" in told
    )
    assert "IPC namespace" in told


def test_a_device_that_the_other_end_numbers_otherwise(
    pair: Pair, gpu_driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """As `CUDA_VISIBLE_DEVICES` may do: a handle opens memory, but not the peer's."""
    gpu_driver.opens_other_memory = True
    check_lane(pair, "nixl/UCX")
    mismatch, at_pairing = warnings(caplog)
    assert mismatch == "the memory mapped through CUDA IPC is not that of holder: CUDA IPC is not used for it"
    assert "cuda_ipc does not work, nixl/UCX" in at_pairing

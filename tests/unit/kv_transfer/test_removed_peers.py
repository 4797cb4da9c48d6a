"""A peer that hangs holds nobody up when it is removed: its memory is unmapped when nothing can use it any more."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

import baton.kernels.p2p.cuda_ipc as driver
from baton.kv_transfer.transports import PeerState, RangeTable, cuda_ipc
from baton.kv_transfer.transports.cuda_ipc import CudaIpcTransport

pytestmark = pytest.mark.timeout(30)

SIZE = 4096


class Gpu:
    """A stand-in for a GPU, on which copies end when `work` is set."""

    def __init__(self) -> None:
        self.work = threading.Event()
        self.fails = False
        self.num_mapped = 0
        self.stream = None

    def query(self) -> bool:
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")
        return self.work.is_set()

    def synchronize(self) -> None:
        self.work.wait(20.0)
        self.query()

    def record(self, stream: object) -> None: ...

    def compile(self, source: int, target: int) -> None: ...

    def launch(self, pieces: RangeTable) -> None: ...

    def open(self, handle: bytes) -> Gpu:
        self.num_mapped += 1
        return self

    address = 1 << 20

    def num_bytes(self) -> int:
        return 1 << 30

    def free(self) -> None:
        assert self.work.is_set() or self.fails, "memory is unmapped while it is copied"
        self.num_mapped -= 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(cuda_ipc, "use_device", lambda device: 0)
    monkeypatch.setattr(cuda_ipc, "GpuCopies", lambda device: gpu)
    monkeypatch.setattr(driver, "DeviceMemory", gpu)
    monkeypatch.setattr(driver, "shared_handle", lambda address: (bytes(64), 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: gpu)
    return gpu


@pytest.fixture
def reader(gpu: Gpu) -> CudaIpcTransport:
    return CudaIpcTransport(SimpleNamespace(address=16, num_bytes=SIZE, device="cpu"), "reader")


def wait_until_unmapped(gpu: Gpu) -> None:
    end = time.monotonic() + 10.0
    while gpu.num_mapped:
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_removing_a_peer_does_not_wait_for_its_probe(gpu: Gpu, reader: CudaIpcTransport) -> None:
    peer = reader.add_peer(reader.metadata())
    assert reader.peer_state(peer) is PeerState.CONNECTING
    assert gpu.num_mapped == 2
    began = time.monotonic()
    reader.remove_peer(peer)
    assert time.monotonic() - began < 5.0
    assert gpu.num_mapped == 2, "the probe still reads it"
    gpu.work.set()
    wait_until_unmapped(gpu)


def test_a_peer_whose_probe_has_ended_is_unmapped_at_once(gpu: Gpu, reader: CudaIpcTransport) -> None:
    peer = reader.add_peer(reader.metadata())
    gpu.work.set()
    reader.remove_peer(peer)
    assert gpu.num_mapped == 0


def test_a_device_that_fails_unmaps_the_peer_and_says_why(
    gpu: Gpu, reader: CudaIpcTransport, caplog: pytest.LogCaptureFixture
) -> None:
    peers = [reader.add_peer(reader.metadata()) for _ in range(2)]
    reader.remove_peer(peers[0])
    gpu.fails = True
    gpu.work.set()
    reader.remove_peer(peers[1])
    wait_until_unmapped(gpu)
    assert caplog.text.count("the probe of reader failed: an illegal memory access") == 2

"""Staged reads over NIXL between the hosts' memory. Host memory stands in for a GPU's."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest

from baton.kv_transfer.errors import NotRegistrable
from baton.kv_transfer.settings import TransferSettings
from baton.kv_transfer.transports import Lane, PeerState, ReadState, fastest, nixl, opening, staged
from baton.kv_transfer.transports.common import make_scratch
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.opening import open_transport
from baton.kv_transfer.transports.range_copies import HostCopies
from baton.kv_transfer.transports.staged import StagedTransport
from baton.kv_transfer.transports.staged_buffers import NUM_BUFFERS, BounceBuffers

SIZE = 40 << 20  # more than all buffers of one side


class End:
    def __init__(self, name: str, seed: int) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
        self.address, self.num_bytes, self.device = self.bytes.ctypes.data, SIZE, "cuda:0"
        buffers = BounceBuffers.allocate("cpu")
        network = NixlTransport(buffers, name)
        self.transport = StagedTransport(self, network, buffers, HostCopies(), HostCopies(), make_scratch("cpu"))


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    both = End("holder", 1), End("reader", 2)
    yield both
    for end in both:
        end.transport.close()


def wait_until_connected(ends: tuple[End, End], peers: tuple[int, ...]) -> None:
    """Connect peers of the reader, then of the holder."""
    reader_first = [end.transport for end in reversed(ends)][: len(peers)]
    deadline = time.monotonic() + 20
    pairs = list(zip(reader_first, peers, strict=True))
    while any(transport.peer_state(peer) is PeerState.CONNECTING for transport, peer in pairs):
        for end in ends:
            end.transport.progress()
        assert time.monotonic() < deadline
    assert [transport.peer_state(peer) for transport, peer in pairs] == [PeerState.CONNECTED] * len(pairs)


def finish(ends: tuple[End, End], read: int) -> ReadState:
    holder, reader = (end.transport for end in ends)
    deadline = time.monotonic() + 20
    while (state := reader.poll(read)) is ReadState.RUNNING:
        holder.progress()
        assert time.monotonic() < deadline
    return state


def test_blocks_arrive_through_the_buffers_of_both_ends(ends: tuple[End, End]) -> None:
    holder, reader = ends
    peer = reader.transport.add_peer(holder.transport.metadata())
    wait_until_connected(ends, (peer,))
    lane = reader.transport.lane(peer)
    assert lane.transport == "nixl/UCX staged"
    assert lane.bytes_per_s is not None
    for ranges in ([(0, 0, SIZE)], [(number * 5000, number * 5000, 4096) for number in range(5000)]):
        reader.bytes[:] = 0
        expected = np.zeros_like(reader.bytes)
        for start, to, length in ranges:
            expected[to : to + length] = holder.bytes[start : start + length]
        read = reader.transport.read(peer, ranges)
        assert finish(ends, read) is ReadState.DONE
        assert reader.transport.release(read)
        assert np.array_equal(reader.bytes, expected)
    for end in ends:
        end.transport.progress()
    assert holder.transport.num_free == reader.transport.num_free == (NUM_BUFFERS, NUM_BUFFERS)


def test_engines_that_read_each_other_may_stop_doing_so_one_after_the_other(ends: tuple[End, End]) -> None:
    """NIXL knows a peer that is read and a reader that is answered by one name."""
    holder, reader = ends
    peers = (
        reader.transport.add_peer(holder.transport.metadata()),
        holder.transport.add_peer(reader.transport.metadata()),
    )
    wait_until_connected(ends, peers)
    holder.transport.remove_peer(peers[1])
    for end in ends:
        end.transport.progress()
    read = reader.transport.read(peers[0], [(0, 0, SIZE)])
    assert finish(ends, read) is ReadState.DONE
    assert np.array_equal(reader.bytes, holder.bytes)


class StandInCopies(HostCopies):
    """Stands in for `GpuCopies`."""

    def __init__(self, device: int) -> None:
        self.device = device

    def compile(self, source: int, target: int) -> None: ...


class StandInGpu:
    """Host memory that calls itself a GPU's."""

    def __init__(self, seed: int, device: str = "cuda:0") -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
        self.address, self.num_bytes, self.device = self.bytes.ctypes.data, SIZE, device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs whose memory is the host's, between which there is no CUDA IPC, and every lane is slow."""

    def no_ipc(*_: object) -> None:
        raise NotRegistrable("there is no CUDA IPC")

    allocate = BounceBuffers.allocate
    monkeypatch.setattr(opening, "CudaIpcTransport", no_ipc)
    monkeypatch.setattr(opening, "GpuCopies", StandInCopies)
    monkeypatch.setattr(fastest, "SLOW_GPU_BYTES_PER_S", 1e18)
    monkeypatch.setattr(opening, "use_device", lambda device: None if device == "cpu" else 0)
    monkeypatch.setattr(BounceBuffers, "allocate", lambda device: allocate("cpu"))
    monkeypatch.setattr(nixl, "use_device", lambda device: None)
    monkeypatch.setattr(staged, "CONNECT_S", 20.0)
    for module in (opening, nixl):
        monkeypatch.setattr(module, "make_scratch", lambda device: make_scratch("cpu"))


def lanes_told(
    settings: TransferSettings, caplog: pytest.LogCaptureFixture, device: str = "cuda:0"
) -> tuple[str, Lane | None, bool]:
    """Return the log's line when two engines are paired, the lane, and whether a read over it brings all bytes."""
    regions = StandInGpu(1, device), StandInGpu(2, device)
    holder, reader = (open_transport(settings, region, f"{device}:{at}") for at, region in enumerate(regions))
    with caplog.at_level(logging.INFO):
        peer = reader.add_peer(holder.metadata())
        deadline = time.monotonic() + 20
        while reader.peer_state(peer) is PeerState.CONNECTING:
            holder.progress()
            assert time.monotonic() < deadline
    lane, read = reader.lane(peer), reader.read(peer, [(0, 0, SIZE)])
    while reader.poll(read) is ReadState.RUNNING:
        holder.progress()
        assert time.monotonic() < deadline
    arrived = reader.poll(read) is ReadState.DONE and np.array_equal(regions[0].bytes, regions[1].bytes)
    reader.release(read)
    reader.close()
    holder.close()
    (line,) = [record.message for record in caplog.records if "GB/s" in record.message and "read" in record.message]
    return line, lane, arrived


def test_engines_with_gpus_measure_both_lanes_and_read_over_the_faster(
    gpus: None, caplog: pytest.LogCaptureFixture
) -> None:
    line, lane, arrived = lanes_told(TransferSettings(cpu_affinity="any"), caplog)
    rates = dict(re.findall(r"(nixl/UCX(?: staged)?) ([\d.]+) GB/s", line))
    assert set(rates) == {"nixl/UCX", "nixl/UCX staged"}
    assert lane is not None
    assert float(rates[lane.transport]) == max(map(float, rates.values()))
    assert arrived


@pytest.mark.parametrize(
    ("changes", "device"), [({"buffer": "device"}, "cuda:0"), ({"buffer": "host"}, "cuda:0"), ({}, "cpu")]
)
def test_engines_without_such_a_buffer_have_one_lane(
    changes: dict[str, str], device: str, gpus: None, caplog: pytest.LogCaptureFixture
) -> None:
    line, lane, arrived = lanes_told(TransferSettings(cpu_affinity="any", **changes), caplog, device)
    assert "staged" not in line
    assert lane is not None
    assert not lane.is_staged
    assert arrived

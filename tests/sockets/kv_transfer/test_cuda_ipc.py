"""Reads between processes of one GPU: the right bytes, a dead holder, invalid handles, a holder in a container."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import pytest

from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.errors import NotRegistrable, TransportError
from baton.kv_transfer.settings import TransferSettings
from baton.kv_transfer.transports import ByteRange, PeerState, ReadState, Transport
from baton.kv_transfer.transports.cuda_ipc import CudaIpcTransport, decode_metadata
from baton.kv_transfer.transports.fastest import FastestTransport
from baton.kv_transfer.transports.opening import open_transport

if TYPE_CHECKING:
    import torch

LAYOUT = KVLayout(model="small", num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32")
NUM_BLOCKS = 600  # 39 MB: two long ranges, or many short ones
SIZE = NUM_BLOCKS * LAYOUT.block_bytes
PATIENCE_S = 60.0
CLONE_NEWIPC = 0x08000000  # of <linux/sched.h>


def region_of(memory: torch.Tensor) -> CacheRegion:
    return CacheRegion.of(
        ArenaRegion(memory.data_ptr(), NUM_BLOCKS, str(memory.device), LAYOUT, 0, LAYOUT.num_kv_heads)
    )


@dataclasses.dataclass(frozen=True)
class Ways:
    """Options of a holder: the ways to read it, and where it runs."""

    over_network_too: bool = False
    in_another_ipc_namespace: bool = False  # as a container is that does not share the host's


def hold(conn: Connection, ways: Ways) -> None:
    """Offer memory in which every block is filled with its number, until a message comes."""
    import torch

    if ways.in_another_ipc_namespace and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWIPC) != 0:
        conn.send(None)  # not allowed to
        return
    memory = torch.arange(NUM_BLOCKS, dtype=torch.int32, device="cuda:0").repeat_interleave(LAYOUT.block_bytes // 4)
    region = region_of(memory)
    transport: Transport
    if ways.over_network_too:
        transport = open_transport(TransferSettings(), region, "holder")
    else:
        transport = CudaIpcTransport(region, "holder")
    conn.send(transport.metadata())
    while not conn.poll(1e-3):
        transport.progress()
    transport.close()


@dataclasses.dataclass
class Holder:
    process: multiprocessing.process.BaseProcess
    conn: Connection
    metadata: bytes

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(PATIENCE_S)


@pytest.fixture(params=[Ways()])
def holder(request: pytest.FixtureRequest) -> Iterator[Holder]:
    """A process that holds blocks."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs, request.param), daemon=True)
    process.start()
    assert ours.poll(PATIENCE_S)
    metadata = ours.recv()
    if metadata is None:
        pytest.skip("a namespace of its own needs root")
    yield Holder(process, ours, metadata)
    if process.is_alive():
        ours.send("end")
    process.join(PATIENCE_S)
    if process.is_alive():
        process.kill()


@pytest.fixture
def memory() -> torch.Tensor:
    import torch

    return torch.full((SIZE // 4,), -1, dtype=torch.int32, device="cuda:0")


@pytest.fixture
def reader(memory: torch.Tensor) -> Iterator[CudaIpcTransport]:
    transport = CudaIpcTransport(region_of(memory), "reader")
    yield transport
    transport.close()


def connect(reader: Transport, metadata: bytes) -> int:
    peer = reader.add_peer(metadata)
    end = time.monotonic() + PATIENCE_S
    while reader.peer_state(peer) is PeerState.CONNECTING:
        assert time.monotonic() < end
    return peer


def finish(reader: Transport, read: int) -> ReadState:
    end = time.monotonic() + PATIENCE_S
    while (state := reader.poll(read)) is ReadState.RUNNING:
        assert time.monotonic() < end
    return state


def block(source: int, target: int, count: int = 1) -> ByteRange:
    return ByteRange(source * LAYOUT.block_bytes, target * LAYOUT.block_bytes, count * LAYOUT.block_bytes)


def numbers(memory: torch.Tensor) -> list[int]:
    """Return the number that fills each block, or -2 if it has several."""
    blocks = memory.view(NUM_BLOCKS, -1)
    return [int(first) if bool((row == first).all()) else -2 for row, first in zip(blocks, blocks[:, 0], strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "ranges",
    [[block(5, 9)], [block(n, NUM_BLOCKS - 1 - n) for n in range(0, NUM_BLOCKS, 3)], [block(0, 100, 500)]],
    ids=["one block", "scattered", "a long range"],
)
def test_blocks_arrive_and_no_others_change(
    ranges: list[ByteRange], holder: Holder, reader: CudaIpcTransport, memory: torch.Tensor
) -> None:
    peer = connect(reader, holder.metadata)
    assert reader.peer_state(peer) is PeerState.CONNECTED
    assert (reader.lane(peer).bytes_per_s or 0) > 0
    assert reader.is_same_device(peer)
    read = reader.read(peer, ranges)
    assert finish(reader, read) is ReadState.DONE
    assert reader.release(read)
    expected = [-1] * NUM_BLOCKS
    for piece in ranges:
        first, target = piece.remote // LAYOUT.block_bytes, piece.local // LAYOUT.block_bytes
        for n in range(piece.num_bytes // LAYOUT.block_bytes):
            expected[target + n] = first + n
    assert numbers(memory) == expected


@pytest.mark.gpu
def test_ranges_that_the_kernel_does_not_support_are_copied_by_the_driver(
    holder: Holder, reader: CudaIpcTransport, memory: torch.Tensor
) -> None:
    peer = connect(reader, holder.metadata)
    read = reader.read(peer, [ByteRange(LAYOUT.block_bytes * 7, 4, 8)])
    assert finish(reader, read) is ReadState.DONE
    assert memory[:4].tolist() == [-1, 7, 7, -1]


@pytest.mark.gpu
def test_reads_from_a_killed_holder_end_and_the_device_still_works(holder: Holder, reader: CudaIpcTransport) -> None:
    import torch

    peer = connect(reader, holder.metadata)
    reads = [reader.read(peer, [block(0, 0, NUM_BLOCKS)]) for _ in range(200)]
    holder.kill()
    assert {finish(reader, read) for read in reads} <= {ReadState.DONE, ReadState.FAILED}
    assert all(reader.release(read) for read in reads)
    reader.remove_peer(peer)
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()  # the device still works


@pytest.mark.gpu
def test_handles_of_a_dead_process_are_refused(holder: Holder, reader: CudaIpcTransport) -> None:
    holder.kill()
    with pytest.raises(TransportError, match="cannot be mapped"):
        reader.add_peer(holder.metadata)


@pytest.mark.gpu
def test_a_peer_on_another_machine_is_refused(holder: Holder, reader: CudaIpcTransport) -> None:
    import msgspec

    elsewhere = msgspec.structs.replace(decode_metadata(holder.metadata), machine="another boot")
    with pytest.raises(TransportError, match="holder is on another machine"):
        reader.add_peer(msgspec.msgpack.encode(elsewhere))


@pytest.mark.gpu
@pytest.mark.parametrize("content", ["blocks", "probe"])
@pytest.mark.parametrize(
    ("offset", "num_bytes", "reason"),
    [
        (0, 2**62 - 1, "are outside the"),
        (2**62 - 16, SIZE, "are outside the"),
        (8, 64, "not at a multiple of 16"),
    ],
    ids=["too much", "too far", "misaligned"],
)
def test_memory_that_is_not_in_the_peers_allocation_is_refused_and_the_device_still_works(
    content: str, offset: int, num_bytes: int, reason: str, holder: Holder, reader: CudaIpcTransport
) -> None:
    import msgspec

    known = decode_metadata(holder.metadata)
    wrong = msgspec.structs.replace(getattr(known, content), offset=offset, num_bytes=num_bytes)
    with pytest.raises(TransportError, match=reason):
        reader.add_peer(msgspec.msgpack.encode(msgspec.structs.replace(known, **{content: wrong})))
    assert reader.peer_state(connect(reader, holder.metadata)) is PeerState.CONNECTED


@pytest.mark.gpu
def test_memory_without_the_peers_nonce_is_not_read(holder: Holder, reader: CudaIpcTransport) -> None:
    import msgspec

    forged = msgspec.structs.replace(decode_metadata(holder.metadata), nonce=bytes(16))
    peer = connect(reader, msgspec.msgpack.encode(forged))
    assert reader.peer_state(peer) is PeerState.BROKEN


@pytest.mark.gpu
@pytest.mark.parametrize("holder", [Ways(over_network_too=True)], indirect=True, ids=["both ways"])
def test_cuda_ipc_is_chosen_over_the_network_on_one_gpu(holder: Holder, memory: torch.Tensor) -> None:
    reader = open_transport(TransferSettings(), region_of(memory), "reader")
    peer = connect(reader, holder.metadata)
    assert reader.peer_state(peer) is PeerState.CONNECTED
    assert isinstance(reader, FastestTransport)
    lane = reader.lane(peer)
    assert lane is not None
    assert lane.transport == "cuda_ipc"
    read = reader.read(peer, [block(3, 4)])
    assert finish(reader, read) is ReadState.DONE
    assert numbers(memory)[3:6] == [-1, 3, -1]
    assert reader.release(read)
    reader.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "holder", [Ways(over_network_too=True, in_another_ipc_namespace=True)], indirect=True, ids=["another namespace"]
)
def test_a_holder_in_another_ipc_namespace_is_read(
    holder: Holder, memory: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        reader = open_transport(TransferSettings(), region_of(memory), "reader")
        peer = connect(reader, holder.metadata)
    assert reader.peer_state(peer) is PeerState.CONNECTED
    lane = reader.lane(peer)
    assert lane is not None
    assert lane.transport == "cuda_ipc" or "not directly: " in caplog.text  # the other way, and why
    read = reader.read(peer, [block(3, 4)])
    assert finish(reader, read) is ReadState.DONE
    assert numbers(memory)[3:6] == [-1, 3, -1]
    assert reader.release(read)
    reader.close()


def test_host_memory_is_refused() -> None:
    with pytest.raises(NotRegistrable):
        CudaIpcTransport(CacheRegion.of(ArenaRegion(4096, 1, "cpu", LAYOUT, 0, LAYOUT.num_kv_heads)), "host")

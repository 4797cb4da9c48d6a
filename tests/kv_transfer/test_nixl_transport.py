"""NIXL as a transport, two agents in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from baton.engine.core.layout import KVLayout, KVRegion
from baton.kv_transfer.errors import MalformedMessage, TransportError
from baton.kv_transfer.transports import ByteRange, PeerState, ReadState
from baton.kv_transfer.transports.nixl import NixlTransport

LAYOUT = KVLayout(model="small", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32")
NUM_BLOCKS = 4

End = tuple[NixlTransport, np.ndarray]


def an_end(name: str) -> End:
    memory = np.full((NUM_BLOCKS, LAYOUT.block_bytes), ord(name[0]), dtype=np.uint8)
    return NixlTransport(KVRegion(memory.ctypes.data, NUM_BLOCKS, "cpu", LAYOUT, 0, LAYOUT.num_kv_heads), name), memory


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """A holder and a reader."""
    holder, reader = an_end("holder"), an_end("reader")
    yield holder, reader
    reader[0].close()
    holder[0].close()


def connect(holder: NixlTransport, reader: NixlTransport) -> int:
    peer = reader.add_peer(holder.metadata())
    deadline = time.monotonic() + 10
    while reader.peer_state(peer) is PeerState.CONNECTING:
        holder.progress()
        assert time.monotonic() < deadline
    assert reader.peer_state(peer) is PeerState.CONNECTED
    return peer


def test_a_read_brings_the_range_and_no_byte_more(ends: tuple[End, End]) -> None:
    (holder, _), (reader, memory) = ends
    peer = connect(holder, reader)
    read = reader.read(peer, [ByteRange(remote=100, local=8, num_bytes=50), ByteRange(0, 200, 1)])
    while reader.poll(read) is ReadState.RUNNING:
        holder.progress()
    assert reader.poll(read) is ReadState.DONE
    assert reader.release(read)
    expected = np.full(memory.size, ord("r"), dtype=np.uint8)
    expected[8:58] = expected[200] = ord("h")
    assert (memory.reshape(-1) == expected).all()


def test_the_lanes_that_ucx_chose_are_known(ends: tuple[End, End]) -> None:
    (holder, _), (reader, _) = ends
    connect(holder, reader)
    assert any("cfg#" in lane for lane in reader.lanes)


@pytest.mark.parametrize(
    "piece",
    [
        ByteRange(NUM_BLOCKS * LAYOUT.block_bytes - 1, 0, 2),
        ByteRange(0, NUM_BLOCKS * LAYOUT.block_bytes, 1),
        ByteRange(-1, 0, 1),
        ByteRange(0, 0, 0),
    ],
)
def test_a_range_outside_the_regions_is_refused(piece: ByteRange, ends: tuple[End, End]) -> None:
    (holder, _), (reader, _) = ends
    peer = connect(holder, reader)
    with pytest.raises(TransportError, match="are outside the"):
        reader.read(peer, [piece])


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"\xff" * 30,
        msgspec.msgpack.encode([b"blob", -1, 8, "DRAM", 0]),
        msgspec.msgpack.encode([b"blob", 0, 0, "DRAM", 0]),
        msgspec.msgpack.encode([b"blob", 0, 8, "CORE", 0]),
    ],
)
def test_metadata_that_are_none_are_refused(metadata: bytes, ends: tuple[End, End]) -> None:
    with pytest.raises(MalformedMessage, match="no metadata of a NIXL peer"):
        ends[1][0].add_peer(metadata)


def test_a_backend_that_is_missing_is_named() -> None:
    memory = np.zeros(LAYOUT.block_bytes, dtype=np.uint8)
    with pytest.raises(TransportError, match=r"no backend CARRIER_PIGEON here; available: .*UCX"):
        NixlTransport(
            KVRegion(memory.ctypes.data, 1, "cpu", LAYOUT, 0, LAYOUT.num_kv_heads), "agent", ["UCX", "CARRIER_PIGEON"]
        )

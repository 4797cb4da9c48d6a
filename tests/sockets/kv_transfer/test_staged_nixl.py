"""Staged reads over NIXL between the hosts' memory. Host memory stands in for a GPU's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from baton.kv_transfer.transports import PeerState, ReadState
from baton.kv_transfer.transports.common import make_scratch
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.range_copies import HostCopies
from baton.kv_transfer.transports.staged import NUM_BUFFERS, BounceBuffers, StagedTransport

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

"""A peer process that answers a handshake and then hangs, with its sockets open: what else goes on meanwhile."""

from __future__ import annotations

import multiprocessing.connection
import os
from collections.abc import Iterator

import numpy as np
import pytest

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome, Received, ReceiveFailed
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.channel import ZmqChannel
from baton.kv_transfer.connector import PeerInfo, TransferSettings
from baton.kv_transfer.group.rank_reader import RankReader, group_metadata
from baton.kv_transfer.handoff import peers
from baton.kv_transfer.protocol.block_runs import encode_runs
from baton.kv_transfer.protocol.messages import (
    DigestMode,
    EngineKey,
    HandshakeAccepted,
    HandshakeRequest,
    LeaseKey,
    decode,
    encode,
)
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket
from baton.kv_transfer.transports.opening import open_transport

from ...helpers.process_context import FORKING
from .connector_cases import QUICK, SMALL, wait_until
from .engine_process import EngineProcess

pytestmark = [pytest.mark.timeout(120)]

NUM_BLOCKS = 32
NAME = EngineKey("silent", 1)
ALIVE: list[np.ndarray] = []  # the memory of regions
OVER_TCP = (("UCX_TLS", "tcp"),)  # where a read of a peer's memory ends only if the peer helps


def a_region() -> CacheRegion:
    memory = np.ones((NUM_BLOCKS, SMALL.block_bytes), dtype=np.uint8)
    ALIVE.append(memory)
    return CacheRegion.of(ArenaRegion(memory.ctypes.data, NUM_BLOCKS, "cpu", SMALL, 0, SMALL.num_kv_heads))


def answer_once_and_hang(
    orders: multiprocessing.connection.Connection, key: ClusterKey, settings: TransferSettings
) -> None:
    """Answer the first handshake, and then nothing. After an order, answer and help as an engine does."""
    os.environ.update(OVER_TCP)
    region = a_region()
    transport = open_transport(settings, region, "silent:1")
    metadata = group_metadata([RankReader(0, region, transport).memory])
    channel = ZmqChannel("127.0.0.1", key)
    orders.send(PeerInfo(NAME.engine_id, NAME.epoch, channel.address, SMALL.fingerprint))
    is_awake, has_answered = False, False
    while True:
        if orders.poll(1e-3):
            orders.recv()
            is_awake = True
        for route, data in channel.receive():
            message = decode(data)
            if isinstance(message, HandshakeRequest) and (is_awake or not has_answered):
                channel.send(route, encode(HandshakeAccepted(NAME, message.sender, metadata)))
                has_answered = True
                orders.send("answered")
        if is_awake:
            transport.progress()


class SilentPeer:
    def __init__(self, key: ClusterKey, settings: TransferSettings) -> None:
        self.pipe, theirs = FORKING.Pipe()
        self.process = FORKING.Process(target=answer_once_and_hang, args=(theirs, key, settings), daemon=True)
        self.process.start()
        assert self.pipe.poll(60.0)
        self.info: PeerInfo = self.pipe.recv()
        self._transport_name = settings.transport_name

    def ticket(self) -> bytes:
        lease = LeaseKey(NAME, "request", 0, 1)
        address, layout = self.info.kv_address, SMALL.fingerprint
        shape = (16, 30.0, DigestMode.OFF, 1, encode_runs([1]))
        return Ticket(TICKET_VERSION, lease, address, layout, self._transport_name, *shape).encode()

    def wake(self) -> None:
        self.pipe.send("wake")


@pytest.fixture(params=["nixl", "ucx"])
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple]:
    """Return a silent peer, a reader that pairs anew every second, and a holder."""
    monkeypatch.setattr(peers, "PAIRING_S", 1.0)
    key, settings = ClusterKey.generate(), QUICK.model_copy(update={"transport": request.param})
    silent = SilentPeer(key, settings)
    reader, holder = (EngineProcess(name, key, SMALL, settings=settings, environ=OVER_TCP) for name in "rh")
    try:
        yield silent, reader, holder
    finally:
        silent.process.kill()
        reader.kill()
        holder.kill()


def test_a_peer_that_hangs_half_way_through_pairing_holds_nothing_up(
    engines: tuple[SilentPeer, EngineProcess, EngineProcess],
) -> None:
    silent, reader, holder = engines
    holder.fill(1)
    reader.peers_changed([silent.info])
    assert silent.pipe.poll(30.0), "it has answered the handshake"

    late = reader.receive(silent.ticket(), 0, [1])
    failed, released = reader.events(2, 30.0)
    assert isinstance(failed, ReceiveFailed)
    assert released == BlocksReleased(late)

    reader.peers_changed([silent.info, holder.info])
    wait_until(lambda: reader.stats().peers_ready == 1)
    offer = holder.offer("request", [1, 2])
    transfer = reader.receive(offer.ticket, 0, [3, 4])
    assert reader.events(1, 30.0) == [Received(transfer)]
    assert reader.content([3, 4]) == holder.content([1, 2])
    assert holder.events(1, 30.0) == [OfferEnded(offer.transfer_id, OfferOutcome.FINISHED)]

    silent.wake()
    wait_until(lambda: reader.stats().peers_ready == 2)


def test_an_engine_ends_although_a_peer_hangs_half_way_through_pairing(
    engines: tuple[SilentPeer, EngineProcess, EngineProcess],
) -> None:
    silent, reader, _ = engines
    reader.peers_changed([silent.info])
    assert silent.pipe.poll(30.0), "it has answered the handshake"
    reader.close()

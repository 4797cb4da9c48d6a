"""Greetings between two engines over the fakes."""

from __future__ import annotations

import random

import pytest

from baton.engine.core.connector import BlocksReleased, ConnectorEvent, ReceiveFailed
from baton.engine.core.layout import KVLayout, KVRegion
from baton.kv_transfer.fake_channel import FakeNetwork
from baton.kv_transfer.handoff import Handoff
from baton.kv_transfer.messages import EngineKey, LeaseKey, Ticket, runs_of
from baton.kv_transfer.settings import PeerInfo, TransferSettings
from baton.kv_transfer.transports.fake import FakeFabric
from baton.kv_transfer.virtual import VirtualClock

SETTINGS = TransferSettings(transport="fake")
OURS = KVLayout(model="ours", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
THEIRS = KVLayout(model="theirs", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")


class Engines:
    def __init__(self, holder_layout: KVLayout) -> None:
        self.clock = VirtualClock()
        self.network = FakeNetwork(self.clock, random.Random(0))
        self.fabric = FakeFabric(self.clock, random.Random(0))
        self.events: list[ConnectorEvent] = []
        self.holder = self.engine("holder", holder_layout)
        self.reader = self.engine("reader", OURS)

    def engine(self, name: str, layout: KVLayout) -> Handoff:
        transport = self.fabric.attach(name, bytearray(4 * layout.block_bytes))
        channel = self.network.bind(f"tcp://{name}")
        region = KVRegion(0, 4, "cpu", layout)
        return Handoff(EngineKey(name, 1), region, channel, transport, SETTINGS, self.clock, self.events.append)

    def pass_time(self, rounds: int = 20) -> None:
        for _ in range(rounds):
            self.clock.advance(0.1)
            self.reader.pump()
            self.holder.pump()

    def receive(self, holder: EngineKey) -> None:
        lease = LeaseKey(holder, "request", 0, 1)
        ticket = Ticket(1, lease, "tcp://holder", OURS.fingerprint, "fake", 16, 30.0, runs_of([1]))
        self.reader.receive(1, ticket.encode(), 0, [1])


def test_a_peer_is_warm_before_its_first_request() -> None:
    engines = Engines(OURS)
    engines.reader.peers_changed([PeerInfo("holder", 1, "tcp://holder", OURS.fingerprint)])
    engines.pass_time()
    assert engines.reader.stats().peers_ready == 1


@pytest.mark.parametrize(
    ("holder_layout", "epoch", "reason"),
    [(THEIRS, 1, "its KV layout is"), (OURS, 2, "engine holder (epoch 2) is gone")],
    ids=["fingerprint", "epoch"],
)
def test_a_holder_refuses_whom_it_does_not_match(holder_layout: KVLayout, epoch: int, reason: str) -> None:
    """Even where the directory's word or the ticket claims otherwise."""
    engines = Engines(holder_layout)
    engines.reader.peers_changed([PeerInfo("holder", epoch, "tcp://holder", OURS.fingerprint)])
    engines.receive(EngineKey("holder", epoch))
    engines.pass_time()
    failed, released = engines.events
    assert isinstance(failed, ReceiveFailed)
    assert reason in failed.reason
    assert released == BlocksReleased(1)
    assert engines.reader.stats().peers_ready == 0
    engines.receive(EngineKey("holder", epoch))  # later ones fail at once
    assert isinstance(engines.events[2], ReceiveFailed)


def test_bytes_that_are_no_message_are_counted_and_dropped() -> None:
    engines = Engines(OURS)
    link = engines.reader._channel.connect("tcp://holder")
    engines.reader._channel.send(link, b"\xc1 nonsense")
    engines.pass_time(2)
    assert engines.holder.stats().messages_malformed == 1

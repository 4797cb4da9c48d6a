"""Two engines that hand blocks over, on fakes of channel and transport."""

from __future__ import annotations

import random

from baton.engine.core.connector import ConnectorEvent
from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.group.rank_reader import RankReader
from baton.kv_transfer.group.tp_read_group import TpReadGroup
from baton.kv_transfer.handoff.coordinator import HandoffCoordinator
from baton.kv_transfer.protocol.block_runs import encode_runs
from baton.kv_transfer.protocol.messages import DigestMode, EngineKey, LeaseKey
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket
from baton.kv_transfer.settings import PeerInfo, TransferSettings

from ...helpers.fake_channel import FakeNetwork
from ...helpers.fake_transport import FakeFabric, FakeTransport
from ...helpers.virtual_clock import VirtualClock

SETTINGS = TransferSettings()
OURS = KVLayout(model="ours", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
THEIRS = KVLayout(model="theirs", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")


class Engines:
    def __init__(
        self,
        holder_layout: KVLayout = OURS,
        reader_layout: KVLayout = OURS,
        transport: str = "fake",
        settings: TransferSettings = SETTINGS,
        reader_settings: TransferSettings = SETTINGS,
        num_blocks: int = 4,
        *,
        helped: bool = False,
    ) -> None:
        """Set up a holder, and a reader that reads as told. `helped`: only with the holder's help, as over TCP."""
        self.num_blocks = num_blocks
        self.clock = VirtualClock()
        self.network = FakeNetwork(self.clock, random.Random(0))
        self.fabric = FakeFabric(self.clock, random.Random(0), helped=helped)
        self.events: list[ConnectorEvent] = []
        self.transports: dict[str, FakeTransport] = {}
        self.holder = self.engine("holder", holder_layout, transport, settings)
        self.reader = self.engine("reader", reader_layout, "fake", reader_settings)
        self.reader_channel = self.network.bound("tcp://reader")

    def engine(
        self, name: str, layout: KVLayout, transport_name: str, settings: TransferSettings
    ) -> HandoffCoordinator:
        size, memory = layout.block_bytes, bytearray(self.num_blocks * layout.block_bytes)
        transport = self.fabric.attach(name, memory)
        transport.name = transport_name
        self.transports[name] = transport
        channel = self.network.bind(f"tcp://{name}")
        region = CacheRegion.of(ArenaRegion(0, self.num_blocks, "cpu", layout, 0, layout.num_kv_heads))
        group = TpReadGroup(RankReader(0, region, transport, lambda block: memory[block * size : (block + 1) * size]))
        return HandoffCoordinator(EngineKey(name, 1), channel, group, settings, self.clock, self.events.append)

    def pass_time(self, rounds: int = 20) -> None:
        for _ in range(rounds):
            self.clock.advance(0.1)
            self.reader.pump()
            self.holder.pump()

    def meet(self) -> None:
        self.reader.peers_changed([PeerInfo("holder", 1, "tcp://holder", OURS.fingerprint)])
        self.pass_time()
        assert self.reader.stats().peers_ready == 1

    def hand_over(self) -> None:
        """Begins to read block 1."""
        self.meet()
        self.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], 1)
        self.receive(EngineKey("holder", 1))
        self.pass_time(3)

    def receive(self, holder: EngineKey, block: int = 1) -> None:
        self.reader.receive(1, ticket_of(holder, block).encode(), 0, [1])


def ticket_of(holder: EngineKey, block: int = 1) -> Ticket:
    lease = LeaseKey(holder, "request", 0, 1)
    runs = encode_runs([block])
    return Ticket(TICKET_VERSION, lease, "tcp://holder", OURS.fingerprint, "fake", 16, 30.0, DigestMode.OFF, 1, runs)

"""A small cluster in virtual time: real state machines, fake network and memory, and an oracle that sees everything.

Every offer fills each KV head of its blocks with a stamp of its own, on whichever ranks keep that head, and a block
that is freed is scribbled over at once. So whoever commits what was freed too early, reads into what is no longer
theirs, or takes one head for another, is found out.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import msgspec

from baton.engine.core.blocks import BlockPool
from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
)
from baton.engine.core.layout import KVLayout, KVRegion
from baton.kv_transfer import messages
from baton.kv_transfer.crew import gather
from baton.kv_transfer.crew_member import Follower
from baton.kv_transfer.errors import RankLost
from baton.kv_transfer.fake_channel import FakeNetwork, NetworkFaults
from baton.kv_transfer.handoff import Handoff
from baton.kv_transfer.messages import EngineKey, Granted, LeaseKey, ReaderKey, Ticket
from baton.kv_transfer.rank_reader import RankReader
from baton.kv_transfer.settings import PeerInfo, TransferSettings
from baton.kv_transfer.transports.fake import FakeFabric, TransportFaults
from baton.kv_transfer.virtual import VirtualClock

HEAD_BYTES = 8
NUM_BLOCKS = 24
LEASE_S = 6.0
SETTINGS = TransferSettings(
    transport="fake",
    lease_s=LEASE_S,
    margin_s=0.5,
    retry_s=0.5,
    connect_s=3.0,
)
SCRIBBLE = b"\xee" * HEAD_BYTES


def a_layout(num_heads: int) -> KVLayout:
    layout = KVLayout(model="stamps", num_layers=1, num_kv_heads=num_heads, head_dim=1, dtype="float32", block_size=1)
    assert layout.head_bytes == HEAD_BYTES
    return layout


class Violation(AssertionError):
    """Something that must never happen."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


@dataclasses.dataclass
class Offering:
    ticket: bytes
    key: LeaseKey
    blocks: list[int]
    content: list[list[bytes]]  # by block and head
    offered_at: float
    withdrawn: bool = False
    given_up: bool = False  # a reader of it failed, or was told to stop
    received: bool = False


@dataclasses.dataclass
class Receiving:
    offering: Offering
    blocks: list[int]
    first_block: int
    writable: bool = True  # not yet committed or released
    failed: bool = False


class Rank:
    """One process of an engine: its share of the blocks, and who reads into it."""

    def __init__(self, world: World, engine: EngineKey, rank: int, size: int) -> None:
        self.agent = f"{engine.engine_id}:{engine.epoch}:{rank}"
        self.heads = world.layout.heads_of(rank, size)
        self.memory = bytearray(SCRIBBLE * len(self.heads) * NUM_BLOCKS)
        self.region = KVRegion(0, NUM_BLOCKS, "cpu", world.layout, self.heads.start, len(self.heads))
        self.reader = RankReader(rank, self.region, world.fabric.attach(self.agent, self.memory))
        self.follower: Follower | None = None  # rank 0 has none
        if rank > 0:
            self.channel = world.wires.bind(f"{self.agent}")
            leader = self.channel.connect(f"{engine.engine_id}:{engine.epoch}:0")
            self.follower = Follower(self.reader, self.channel, leader, world.clock)

    def die(self, world: World) -> None:
        world.fabric.kill(self.agent)
        if self.follower is not None:
            self.channel.close()
        self.follower = None

    def pump(self) -> None:
        if self.follower is not None:
            self.follower.pump()

    def content(self, block: int) -> list[bytes]:
        """By head."""
        place = block * len(self.heads) * HEAD_BYTES
        return [bytes(self.memory[at : at + HEAD_BYTES]) for at in range(place, place + self.share, HEAD_BYTES)]

    def fill(self, block: int, stamps: list[bytes]) -> None:
        """`stamps`: of all the model's heads."""
        self.memory[block * self.share : (block + 1) * self.share] = b"".join(stamps[head] for head in self.heads)

    @property
    def share(self) -> int:
        """Bytes of one block."""
        return self.region.block_bytes


class Engine:
    """One group: its ranks' memory, its block pool, and what the core would do with the connector's events."""

    def __init__(self, world: World, name: str, epoch: int, size: int) -> None:
        self.world = world
        self.key = EngineKey(name, epoch)
        self.pool = BlockPool(NUM_BLOCKS)
        self.offers: dict[int, Offering] = {}
        self.receives: dict[int, Receiving] = {}
        self.committed: list[list[int]] = []
        self.ids = itertools.count(1)
        self.channel = world.network.bind(f"tcp://{name}")
        self.wire = world.wires.bind(f"{name}:{epoch}:0")
        self.ranks = [Rank(world, self.key, rank, size) for rank in range(size)]
        crew = gather(self.ranks[0].reader, size, self.wire, clock=world.clock, wait=lambda _: world.clock.advance(0.1))
        settings = msgspec.structs.replace(SETTINGS, batch_bytes=2 * crew.block_bytes)
        self.handoff = Handoff(self.key, self.channel, crew, settings, world.clock, self.on_event)

    @property
    def info(self) -> PeerInfo:
        return PeerInfo(self.key.engine_id, self.key.epoch, self.channel.address, self.world.layout.fingerprint)

    def pump(self, stalled_rank: int | None = None) -> None:
        for number, rank in enumerate(self.ranks):
            if number != stalled_rank:
                rank.pump()
        self.handoff.pump()

    def die(self) -> None:
        self.channel.close()
        self.wire.close()
        for rank in self.ranks:
            rank.die(self.world)

    def holds(self, block: int, stamps: list[bytes]) -> bool:
        return all(rank.content(block) == [stamps[head] for head in rank.heads] for rank in self.ranks)

    def offer(self, num_blocks: int) -> Offering | None:
        if num_blocks > self.pool.num_free:
            return None
        blocks = self.pool.allocate(num_blocks)
        content = [self.world.stamps() for _ in blocks]
        for block, stamps in zip(blocks, content, strict=True):
            for rank in self.ranks:
                rank.fill(block, stamps)
        number = next(self.ids)
        key = LeaseKey(self.key, f"request-{number}", 0, number)
        runs = messages.runs_of(blocks)
        ticket = Ticket(1, key, self.channel.address, self.info.fingerprint, "fake", num_blocks, LEASE_S, runs)
        offering = Offering(ticket.encode(), key, blocks, content, self.world.clock())
        self.offers[number] = offering
        self.handoff.offer(key, num_blocks)
        return offering

    def withdraw(self, number: int) -> None:
        self.offers[number].withdrawn = True
        self.handoff.withdraw(number)

    def abandon(self, reason: str) -> None:
        for offering in self.offers.values():
            offering.withdrawn = True
        self.handoff.abandon(reason)

    def receive(self, offering: Offering, first_block: int) -> None:
        first_block = min(first_block, len(offering.blocks))
        count = len(offering.blocks) - first_block
        if count > self.pool.num_free:
            return
        number = next(self.ids)
        blocks = self.pool.allocate(count)
        self.receives[number] = Receiving(offering, blocks, first_block)
        self.handoff.receive(number, offering.ticket, first_block, blocks)

    def cancel(self, number: int) -> None:
        self.receives[number].offering.given_up = True
        self.handoff.cancel(number)

    def on_event(self, event: ConnectorEvent) -> None:
        match event:
            case OfferEnded():
                self._offer_ended(event)
            case Received():
                self._received(event.transfer_id)
            case ReceiveFailed():
                receiving = self._receiving(event.transfer_id)
                require(not receiving.failed, "a receive failed twice")
                receiving.failed = receiving.offering.given_up = True
            case BlocksReleased():
                receiving = self._receiving(event.transfer_id)
                require(receiving.failed, "blocks were released of a receive that had not failed")
                receiving.writable = False
                del self.receives[event.transfer_id]
                self.free(receiving.blocks)

    def free(self, blocks: list[int]) -> None:
        for rank in self.ranks:
            for block in blocks:
                rank.fill(block, [SCRIBBLE] * self.world.layout.num_kv_heads)
        self.pool.release(blocks)

    def may_be_written(self, block: int) -> bool:
        return any(block in receiving.blocks for receiving in self.receives.values() if receiving.writable)

    def _receiving(self, number: int) -> Receiving:
        require(number in self.receives, f"receive {number} had already ended")
        return self.receives[number]

    def _offer_ended(self, event: OfferEnded) -> None:
        require(event.transfer_id in self.offers, f"offer {event.transfer_id} ended twice")
        offering = self.offers.pop(event.transfer_id)
        now = self.world.clock()
        match event.outcome:
            case OfferOutcome.FINISHED:
                require(offering.received, "an offer finished that nobody received")
            case OfferOutcome.WITHDRAWN:
                require(offering.withdrawn or offering.given_up or offering.received, "an offer ended for no reason")
            case OfferOutcome.EXPIRED:
                require(now >= offering.offered_at + LEASE_S, "an offer expired early")
        self.free(offering.blocks)

    def _received(self, number: int) -> None:
        receiving = self._receiving(number)
        require(not receiving.failed, "a failed receive was committed")
        reader = ReaderKey(self.key, number)
        require((receiving.offering.key, reader) in self.world.grants, "committed without a grant of its own")
        wanted = receiving.offering.content[receiving.first_block :]
        intact = all(self.holds(block, stamps) for block, stamps in zip(receiving.blocks, wanted, strict=True))
        require(intact, "committed blocks hold something else")
        receiving.offering.received = True
        del self.receives[number]
        self.committed.append(receiving.blocks)


class World:
    """Prefill engines P0, P1 and decode engines D0, D1; `step` does something at random.

    `sizes`: the ranks of each. Messages between the ranks of one engine take their time, but none is lost.
    """

    def __init__(self, seed: int, sizes: tuple[int, int, int, int] = (1, 1, 1, 1), num_heads: int = 1) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.layout = a_layout(num_heads)
        self.sizes = dict(zip(("P0", "P1", "D0", "D1"), sizes, strict=True))
        delay_s = self.rng.choice((0.0, 0.05, 0.3))
        self.wires = FakeNetwork(self.clock, self.rng, NetworkFaults(delay_s=(delay_s, delay_s)))
        network_faults = NetworkFaults(delay_s=(0.0, 0.4), drop=0.1, duplicate=0.1, junk=0.02)
        self.network = FakeNetwork(self.clock, self.rng, network_faults)
        self.fabric = FakeFabric(
            self.clock,
            self.rng,
            TransportFaults(
                connect_s=(0.0, 0.2),
                read_s=(0.0, 2.0),
                slow=0.1,
                slow_s=(2.0, 9.0),
                fail=0.1,
                late_s=(0.0, 5.0),
                refuse=0.03,
                break_peer=0.1,
            ),
        )
        self.fabric.on_write = self._on_write
        self.grants: set[tuple[LeaseKey, ReaderKey]] = set()
        self._watch_grants()
        self._stamps = itertools.count(1)
        self._epochs = itertools.count(1)
        self.engines: dict[str, Engine] = {}
        self.ranks_missed = 0
        for name in self.sizes:
            self.start(name)
        self.tickets: list[Offering] = []
        self.tell_everyone()

    def start(self, name: str) -> None:
        self.engines[name] = Engine(self, name, next(self._epochs), self.sizes[name])

    def restart(self, name: str) -> None:
        """Killed and back at the same address. Its transfer ids begin at 1 again, as a new process's do."""
        self.engines[name].die()
        self.start(name)

    def tell_everyone(self) -> None:
        for engine in self.engines.values():
            self.tell(engine)

    def tell(self, engine: Engine) -> None:
        engine.handoff.peers_changed([other.info for other in self.engines.values() if other is not engine])

    def stamps(self) -> list[bytes]:
        """One for each head."""
        return [next(self._stamps).to_bytes(HEAD_BYTES, "little") for _ in range(self.layout.num_kv_heads)]

    def pass_time(
        self, seconds: float, stalled: Engine | None = None, rank: int | None = None, tick_s: float = 0.2
    ) -> None:
        """Everyone pumps all the while, except one that is stalled (as by a garbage collection), or one rank of it."""
        end = self.clock() + seconds
        while self.clock() < end:
            self.clock.advance(min(tick_s, end - self.clock()))
            for engine in list(self.engines.values()):
                if engine is not stalled:
                    self.pump(engine)
                elif rank is not None:
                    self.pump(engine, stalled_rank=rank)

    def pump(self, engine: Engine, stalled_rank: int | None = None) -> None:
        """An engine that misses one of its ranks is started anew."""
        try:
            engine.pump(stalled_rank)
        except RankLost as error:
            self.ranks_missed += 1
            engine.abandon(str(error))
            self.restart(engine.key.engine_id)

    def check_books(self) -> None:
        for engine in self.engines.values():
            held = [offering.blocks for offering in engine.offers.values()]
            receiving = [entry.blocks for entry in engine.receives.values()]
            referenced = sum(map(len, [*held, *receiving, *engine.committed]))
            require(engine.pool.num_free + referenced == NUM_BLOCKS, f"{engine.key.engine_id} has lost blocks")
            engine.pool.check()

    def come_to_rest(self) -> None:
        """Without faults and with some patience everything ends, exactly once."""
        self.network.faults, self.fabric.faults = NetworkFaults(), TransportFaults()
        for name, engine in list(self.engines.items()):
            if any(rank.follower is None for rank in engine.ranks[1:]):
                self.restart(name)  # whoever watches its processes has noticed by now
        self.tell_everyone()
        self.pass_time(3 * LEASE_S, tick_s=0.5)
        for engine in self.engines.values():
            require(not engine.offers, f"offers of {engine.key.engine_id} never ended: {list(engine.offers)}")
            require(not engine.receives, f"receives of {engine.key.engine_id} never ended: {list(engine.receives)}")
            for blocks in engine.committed:
                engine.free(blocks)
            engine.committed.clear()
            require(engine.pool.num_free == NUM_BLOCKS, f"{engine.key.engine_id} has lost blocks")
            require(len(engine.handoff.leases) == len(engine.handoff.receives) == 0, "a state machine still holds on")
        self.check_books()

    def step(self) -> None:
        actions: list[Callable[[], object]] = [self.hand_off] * 4 + [self.wait] * 3
        actions += [
            self.cancel,
            self.withdraw,
            self.stall,
            self.stall_a_reader,
            self.stall_a_reader,
            self.give_ticket_again,
            self.finish_decoding,
            self.crash,
        ]
        if max(self.sizes.values()) > 1:
            actions += [*actions, self.lose_a_rank, self.stall_a_rank]
        self.rng.choice(actions)()
        self.check_books()

    def hand_off(self) -> Engine:
        offering = self.engines[self.rng.choice(("P0", "P1"))].offer(self.rng.randint(1, 6))
        reader = self.engines[self.rng.choice(("D0", "D1"))]
        if offering is not None:
            self.tickets.append(offering)
            reader.receive(offering, self.rng.choice((0, 0, 1, 6)))
        return reader

    def stall_a_reader(self) -> None:
        """It has just claimed; by the time it looks again the lease is over."""
        reader = self.hand_off()
        self.pump(reader)
        self.pass_time(1.5 * LEASE_S, stalled=reader)

    def give_ticket_again(self) -> None:
        if self.tickets:
            self.engines[self.rng.choice(("D0", "D1"))].receive(self.rng.choice(self.tickets), 0)

    def cancel(self) -> None:
        engine = self.engines[self.rng.choice(("D0", "D1"))]
        if engine.receives:
            engine.cancel(self.rng.choice(list(engine.receives)))

    def withdraw(self) -> None:
        engine = self.engines[self.rng.choice(("P0", "P1"))]
        if engine.offers:
            engine.withdraw(self.rng.choice(list(engine.offers)))

    def wait(self) -> None:
        self.pass_time(self.rng.choice((0.2, 0.6, 2.0, LEASE_S / 2)))

    def stall(self) -> None:
        self.pass_time(self.rng.choice((2.0, 1.5 * LEASE_S)), stalled=self.rng.choice(list(self.engines.values())))

    def stall_a_rank(self) -> None:
        engine, rank = self._any_rank()
        self.pass_time(self.rng.choice((2.0, 1.5 * LEASE_S)), stalled=engine, rank=rank)

    def lose_a_rank(self) -> None:
        """The rest of its engine is not told."""
        engine, rank = self._any_rank()
        engine.ranks[rank].die(self)

    def _any_rank(self) -> tuple[Engine, int]:
        """One that is not rank 0."""
        engine = self.rng.choice([engine for engine in self.engines.values() if len(engine.ranks) > 1])
        return engine, self.rng.randrange(1, len(engine.ranks))

    def finish_decoding(self) -> None:
        for engine in self.engines.values():
            if engine.committed:
                engine.free(engine.committed.pop(0))

    def crash(self) -> None:
        name = self.rng.choice(list(self.engines))
        self.restart(name)
        for engine in self.engines.values():
            if self.rng.random() < 0.5:  # the others may hear of it late
                self.tell(engine)

    def _on_write(self, agent: str, offset: int, num_bytes: int) -> None:
        for engine in self.engines.values():
            for rank in engine.ranks:
                if rank.agent == agent:
                    for block in range(offset // rank.share, (offset + num_bytes - 1) // rank.share + 1):
                        allowed = engine.may_be_written(block)
                        require(allowed, f"block {block} of {agent} was written after it was freed")

    def _watch_grants(self) -> None:
        carry = self.network.carry

        def watching(sender, to_address, route, data):
            message = messages.decode(data)
            if isinstance(message, Granted):
                self.grants.add((message.lease, message.reader))
            carry(sender, to_address, route, data)

        self.network.carry = watching  # type: ignore[method-assign]

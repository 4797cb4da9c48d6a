"""One engine of the simulation: real state machines on fake memory, and an oracle that sees everything.

Every offer fills each KV head of its blocks with a stamp of its own, on whichever ranks keep that head, and a block
that is freed is scribbled over at once. So whoever commits what was freed too early, reads what is not written yet or
into what is no longer theirs, or takes one head for another, is found out.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
)
from baton.engine.core.kv.blocks import BlockPool
from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.group.rank_reader import RankReader
from baton.kv_transfer.group.read_member import read_member
from baton.kv_transfer.group.rpc import GroupMember
from baton.kv_transfer.group.tp_read_group import gather
from baton.kv_transfer.handoff.coordinator import HandoffCoordinator
from baton.kv_transfer.protocol.block_runs import encode_runs
from baton.kv_transfer.protocol.messages import EngineKey, LeaseKey, ReaderKey
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket
from baton.kv_transfer.settings import PeerInfo, TransferSettings

if TYPE_CHECKING:
    from .simulation import World

HEAD_BYTES = 8
NUM_BLOCKS = 24
LEASE_S = 6.0
STALL_S = 12.0
SETTINGS = TransferSettings(
    lease_s=LEASE_S,
    margin_s=0.5,
    retry_s=0.5,
    connect_s=3.0,
    stall_s=STALL_S,
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
    """A prompt's blocks at a prefill engine, of which some may still be written."""

    ticket: bytes
    key: LeaseKey
    blocks: list[int]
    content: list[list[bytes]]  # by block and head
    num_written: int
    offered_at: float
    last_block: tuple[int, ...] = ()  # what replaces the ticket's last block when it is written; empty: nothing
    withdrawn: bool = False
    given_up: bool = False  # a reader of it failed, or was told to stop
    received: bool = False

    @property
    def grows(self) -> bool:
        return self.num_written < len(self.blocks) and not self.withdrawn


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
        self.region = CacheRegion.of(ArenaRegion(0, NUM_BLOCKS, "cpu", world.layout, self.heads.start, len(self.heads)))
        transport = world.fabric.attach(self.agent, self.memory)
        self.reader = RankReader(rank, self.region, transport, lambda block: b"".join(self.content(block)))
        self.member: GroupMember | None = None  # rank 0 has none
        if rank > 0:
            self.channel = world.wires.bind(f"{self.agent}")
            leader = self.channel.connect(f"{engine.engine_id}:{engine.epoch}:0")
            self.member = read_member(self.reader, self.channel, leader, world.clock)

    def die(self, world: World) -> None:
        world.fabric.kill(self.agent)
        if self.member is not None:
            self.channel.close()
        self.member = None

    def pump(self) -> None:
        if self.member is not None:
            self.member.pump()

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
        group = gather(
            self.ranks[0].reader, size, self.wire, clock=world.clock, wait=lambda _: world.clock.advance(0.1)
        )
        settings = SETTINGS.model_copy(update={"batch_bytes": 2 * group.block_bytes, "digest": world.digest})
        self.handoff = HandoffCoordinator(
            self.key, self.channel, group, settings, world.clock, self.on_event, digest_blocks=2
        )

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

    # ------------------------------------------------------------------ prefill

    def offer(
        self, num_blocks: int, num_written: int, request_id: str, generation: int, *, replaces: bool = False
    ) -> Offering | None:
        """Offer blocks of which `num_written` are there at once, the others when `write` is called.

        `replaces`: the ticket of a growing offer ends with another block, which the last `write` replaces, as it does
        with slots of states.
        """
        if num_blocks > self.pool.num_free:
            return None
        blocks, number = self.pool.allocate(num_blocks), next(self.ids)
        key = LeaseKey(self.key, request_id, generation, number)
        last_block = tuple(blocks[-1:]) if replaces and num_written < num_blocks else ()
        listed = [*blocks[:-1], self.world.rng.randrange(NUM_BLOCKS)] if last_block else blocks
        ticket = Ticket(
            TICKET_VERSION,
            key,
            self.channel.address,
            self.info.fingerprint,
            "fake",
            num_blocks,
            LEASE_S,
            self.world.digest,
            num_written,
            encode_runs(listed),
        )
        content = [self.world.stamps() for _ in blocks]
        offering = Offering(ticket.encode(), key, blocks, content, num_written, self.world.clock(), last_block)
        self.offers[number] = offering
        self._fill(offering, range(num_written))
        self.handoff.offer(key, listed, num_written)
        return offering

    def write(self, number: int, num_blocks: int) -> None:
        """Another chunk of the prompt was computed."""
        offering = self.offers[number]
        start = offering.num_written
        offering.num_written = min(start + num_blocks, len(offering.blocks))
        self._fill(offering, range(start, offering.num_written))
        is_complete = offering.num_written == len(offering.blocks)
        self.handoff.advance(number, offering.num_written, offering.last_block if is_complete else ())

    def withdraw(self, number: int) -> None:
        """Nobody wants it, or its request gave up its blocks: nothing more is written."""
        self.offers[number].withdrawn = True
        self.handoff.withdraw(number)

    def withdraw_request(self, request_id: str, generation: int) -> None:
        for number, offering in list(self.offers.items()):
            if offering.key.request_id == request_id and offering.key.generation <= generation:
                self.withdraw(number)

    def abandon(self, reason: str) -> None:
        for offering in self.offers.values():
            offering.withdrawn = True
        self.handoff.abandon(reason)

    def _fill(self, offering: Offering, which: range) -> None:
        for index in which:
            for rank in self.ranks:
                rank.fill(offering.blocks[index], offering.content[index])

    # ------------------------------------------------------------------ decode

    def receive(self, offering: Offering, first_block: int) -> int | None:
        first_block = min(first_block, len(offering.blocks))
        count = len(offering.blocks) - first_block
        if count > self.pool.num_free:
            return None
        number = next(self.ids)
        blocks = self.pool.allocate(count)
        self.receives[number] = Receiving(offering, blocks, first_block)
        self.handoff.receive(number, offering.ticket, first_block, blocks)
        return number

    def cancel(self, number: int) -> None:
        self.receives[number].offering.given_up = True
        self.handoff.cancel(number)

    # ------------------------------------------------------------------ events

    def on_event(self, event: ConnectorEvent) -> None:
        match event:
            case OfferEnded():
                self._offer_ended(event)
            case Received():
                self._received(event.transfer_id)
                self.world.gateway.on_received(self, event.transfer_id)
            case ReceiveFailed():
                receiving = self._receiving(event.transfer_id)
                require(not receiving.failed, "a receive failed twice")
                receiving.failed = receiving.offering.given_up = True
                self.world.gateway.on_failed(self, event.transfer_id)
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
        offering = receiving.offering
        require(not receiving.failed, "a failed receive was committed")
        reader = ReaderKey(self.key, number)
        require((offering.key, reader) in self.world.grants, "committed without a grant of its own")
        require(offering.num_written == len(offering.blocks), "committed before the prompt was read to its end")
        wanted = offering.content[receiving.first_block :]
        intact = all(self.holds(block, stamps) for block, stamps in zip(receiving.blocks, wanted, strict=True))
        require(intact, "committed blocks hold something else")
        offering.received = True
        del self.receives[number]
        self.committed.append(receiving.blocks)

"""A small cluster in virtual time: real state machines, a gateway, a fake network and memory with all their faults."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from baton.kv_transfer.errors import RankLost
from baton.kv_transfer.protocol import messages
from baton.kv_transfer.protocol.messages import DigestMode, Granted, LeaseKey, ReaderKey

from ...helpers.fake_channel import FakeNetwork, NetworkFaults
from ...helpers.fake_transport import FakeFabric, TransportFaults
from ...helpers.virtual_clock import VirtualClock
from .simulated_engine import HEAD_BYTES, LEASE_S, NUM_BLOCKS, Engine, a_layout, require
from .simulated_gateway import Gateway


class World:
    """A gateway, prefill engines P0, P1 and decode engines D0, D1.

    `sizes`: the ranks of each. Messages between the ranks of one engine take their time, but none is lost. Reads are
    corrupt now and then where digests would find it. In every second world they need the holder's help.
    """

    def __init__(
        self,
        seed: int,
        sizes: tuple[int, int, int, int] = (1, 1, 1, 1),
        num_heads: int = 1,
        digest: DigestMode = DigestMode.OFF,
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = VirtualClock()
        self.layout = a_layout(num_heads)
        self.digest = digest
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
                corrupt=0.1 if digest is DigestMode.VERIFY else 0.0,
                refuse=0.03,
                break_peer=0.1,
            ),
            helped=self.rng.random() < 0.5,
        )
        self.fabric.on_write = self._on_write
        self.grants: set[tuple[LeaseKey, ReaderKey]] = set()
        self._watch_grants()
        self._stamps = itertools.count(1)
        self._epochs = itertools.count(1)
        self.engines: dict[str, Engine] = {}
        self.gateway = Gateway(self)
        self.ends: Counter[str] = Counter()  # of offers and receives, by outcome, of engines that are gone
        for name in self.sizes:
            self.start(name)
        self.tell_everyone()

    def start(self, name: str) -> None:
        self.engines[name] = Engine(self, name, next(self._epochs), self.sizes[name])

    def restart(self, name: str) -> None:
        """Killed and back at the same address. Its transfer ids begin at 1 again, as a new process's do."""
        self.count_ends(self.engines[name])
        self.engines[name].die()
        self.start(name)

    def count_ends(self, engine: Engine) -> None:
        stats = engine.handoff.stats()
        self.ends.update({f"offer {outcome}": count for outcome, count in stats.offers.items()})
        self.ends.update({f"receive {outcome}": count for outcome, count in stats.receives.items()})
        self.ends["block read early"] += stats.blocks_read_early

    def tell_everyone(self) -> None:
        for engine in self.engines.values():
            self.tell(engine)

    def tell(self, engine: Engine, without: str = "") -> None:
        """Tell an engine which others are alive, all but the one named `without`."""
        others = (other for name, other in self.engines.items() if other is not engine and name != without)
        engine.handoff.peers_changed([other.info for other in others])

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
            self.ends["rank missed"] += 1
            engine.abandon(str(error))
            self.restart(engine.key.engine_id)

    def check_books(self) -> None:
        for engine in self.engines.values():
            held = [offering.blocks for offering in engine.offers.values()]
            receiving = [entry.blocks for entry in engine.receives.values()]
            referenced = sum(map(len, [*held, *receiving, *engine.committed]))
            require(engine.pool.num_free + referenced == NUM_BLOCKS, f"{engine.key.engine_id} has lost blocks")
            engine.pool.check()

    def finish_decoding(self) -> None:
        for engine in self.engines.values():
            if engine.committed:
                engine.free(engine.committed.pop(0))

    def come_to_rest(self) -> None:
        """Without faults and with some patience everything ends, exactly once."""
        self.network.faults, self.fabric.faults = NetworkFaults(), TransportFaults()
        for name, engine in list(self.engines.items()):
            if any(rank.member is None for rank in engine.ranks[1:]):
                self.restart(name)  # whoever watches its processes has noticed by now
        self.tell_everyone()
        for engine in self.engines.values():
            for number, offering in list(engine.offers.items()):
                engine.write(number, len(offering.blocks))  # whatever was begun is read to its end
        self.pass_time(4 * LEASE_S, tick_s=0.5)
        for engine in self.engines.values():
            require(not engine.offers, f"offers of {engine.key.engine_id} never ended: {list(engine.offers)}")
            require(not engine.receives, f"receives of {engine.key.engine_id} never ended: {list(engine.receives)}")
            for blocks in engine.committed:
                engine.free(blocks)
            engine.committed.clear()
            require(engine.pool.num_free == NUM_BLOCKS, f"{engine.key.engine_id} has lost blocks")
            require(len(engine.handoff.leases) == len(engine.handoff.receives) == 0, "a state machine still holds on")
            require(not engine.handoff.any_access, "a read is never let go")
            self.count_ends(engine)
        self.check_books()

    def prove_all_can_still_hand_off(self) -> None:
        """After all that has happened, every pair of engines works."""
        for prefill in ("P0", "P1"):
            for decode in ("D0", "D1"):
                offering = self.engines[prefill].offer(3, 1, f"proof {prefill} {decode}", 0)
                assert offering is not None
                self.engines[decode].receive(offering, 1)
                self.pass_time(1.0)
                self.engines[prefill].write(offering.key.offer, 2)
                self.pass_time(5.0)
                require(offering.received, f"a hand-off from {prefill} to {decode} fails though nothing is wrong")

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

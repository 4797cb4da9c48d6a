"""Engines that read each other through pinned memory, under everything that may happen to them, in any order.

Of each engine's memory the first half is read by others and never changes; reads fill places in the second half. Once a
read is released, its place belongs to somebody else, and nothing may be written to it before the next read.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from baton.kv_transfer.transports import PeerHandle, PeerState, ReadHandle, ReadState
from baton.kv_transfer.transports.staged import CONNECT_S
from baton.kv_transfer.transports.staged_messages import KEPT_S
from baton.kv_transfer.transports.staged_reads import PATIENCE_S

from ...helpers.fake_transport import TransportFaults
from .staged_engines import NUM_BUFFERS, SIZE, Gpu, Machines

HALF = SIZE // 2
PLACE = 512
LENGTHS = st.lists(st.integers(1, PLACE), min_size=1, max_size=3)
OTHERS = 0xEE  # bytes of places that no read fills


@dataclasses.dataclass
class Read:
    reader: str
    holder: str
    handle: ReadHandle
    place: int
    ranges: list[tuple[int, int, int]]


class StagedMachine(RuleBasedStateMachine):
    """Up to four engines, each of which may read all others."""

    @initialize(
        seed=st.integers(0, 1000),
        count=st.integers(2, 4),
        copy_s=st.sampled_from([0.0, 0.02, 0.1]),
        read_s=st.sampled_from([0.0, 0.05, 1.0]),
    )
    def start(self, seed: int, count: int, copy_s: float, read_s: float) -> None:
        self.machines = Machines(seed)
        self.fabric, self.read_s = self.machines.fabric, read_s
        self.gpus = {"holder": self.machines.holder, "reader": self.machines.reader}
        self.gpus |= {f"{number} other": Gpu(self.machines, f"{number} other") for number in range(count - 2)}
        for number, gpu in enumerate(self.gpus.values()):
            gpu.bytes[:HALF] = np.random.default_rng((seed, number)).integers(0, 256, HALF, dtype=np.uint8)
            gpu.bytes[HALF:] = OTHERS
            gpu.down.seconds = gpu.up.seconds = copy_s
        self.expected = {name: gpu.bytes.copy() for name, gpu in self.gpus.items()}
        self.free = {name: list(range(HALF, SIZE, PLACE)) for name in self.gpus}
        self.dead: list[Gpu] = []  # kept, because copies of them land later
        self.peers: dict[tuple[str, str], PeerHandle] = {}
        self.reads: list[Read] = []
        self.had_faults = False
        self.heal()

    def heal(self) -> None:
        self.fabric.faults = TransportFaults(read_s=(0.0, self.read_s))

    @precondition(lambda self: len(self.gpus) > 1)
    @rule(
        data=st.data(), reads=st.lists(st.lists(st.integers(1, PLACE), min_size=1, max_size=3), min_size=1, max_size=4)
    )
    def read(self, data: st.DataObject, reads: list[list[int]]) -> None:
        """Begin reads of ranges of these lengths, all of one engine by another."""
        reader = data.draw(st.sampled_from(sorted(self.gpus)))
        holder = data.draw(st.sampled_from(sorted(self.gpus.keys() - {reader})))
        if (reader, holder) not in self.peers:
            self.connect(reader, holder)
        gpu, peer = self.gpus[reader], self.peers[reader, holder]
        for lengths in reads:
            if gpu.transport.peer_state(peer) is not PeerState.CONNECTED or not self.free[reader]:
                return
            place, at, ranges = self.free[reader].pop(), 0, []
            for length in lengths:
                length = min(length, PLACE - at)
                if length:
                    ranges.append((data.draw(st.integers(0, HALF - length)), place + at, length))
                at += length
            self.reads.append(Read(reader, holder, gpu.transport.read(peer, ranges), place, ranges))

    def connect(self, reader: str, holder: str) -> None:
        faults, self.fabric.faults = self.fabric.faults, TransportFaults()
        metadata = self.gpus[holder].transport.metadata()
        self.peers[reader, holder] = self.gpus[reader].transport.add_peer(metadata)
        self.pass_time(0.5)
        self.fabric.faults = faults

    @rule(seconds=st.sampled_from([0.03, 0.1, 0.4, 2.0, 4.5, 16.0]))
    def pass_time(self, seconds: float) -> None:
        step_s = min(0.2, max(0.01, seconds / 20))
        for _ in range(round(seconds / step_s)):
            self.machines.clock.advance(step_s)
            for gpu in self.gpus.values():
                gpu.transport.progress()
            for (reader, _), peer in self.peers.items():
                self.gpus[reader].transport.peer_state(peer)
            self.reads = [read for read in self.reads if not self.ends(read)]
            for name, gpu in self.gpus.items():
                for place in self.free[name]:
                    assert (gpu.bytes[place : place + PLACE] == OTHERS).all(), "written to a place of somebody else"

    def ends(self, read: Read) -> bool:
        """Take in the end of a read, and give its place to something else. Returns whether it has ended."""
        gpu, expected = self.gpus[read.reader], self.expected[read.reader]
        state = gpu.transport.poll(read.handle)
        if state is ReadState.RUNNING or not gpu.transport.release(read.handle):
            return False
        if state is ReadState.DONE:
            source = self.expected[read.holder]
            for start, to, length in read.ranges:
                assert np.array_equal(gpu.bytes[to : to + length], source[start : start + length])
        else:
            assert self.had_faults or read.holder not in self.gpus, "it failed for no reason"
        gpu.bytes[read.place : read.place + PLACE] = expected[read.place : read.place + PLACE]
        self.free[read.reader].append(read.place)
        return True

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def forget_a_peer(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(sorted(self.peers)))
        if not any((read.reader, read.holder) == pair for read in self.reads):
            self.gpus[pair[0]].transport.remove_peer(self.peers.pop(pair))

    @precondition(lambda self: len(self.gpus) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.gpus)))
        self.fabric.kill(name)
        self.dead.append(self.gpus.pop(name))
        self.peers = {pair: peer for pair, peer in self.peers.items() if pair[0] != name}
        self.reads = [read for read in self.reads if read.reader != name]

    @rule(fault=st.sampled_from(["a few lost", "all lost", "reads fail", "reads are late"]))
    def break_the_network(self, fault: str) -> None:
        self.had_faults = True
        self.fabric.faults = TransportFaults(
            read_s=(0.0, self.read_s),
            lose={"a few lost": 0.1, "all lost": 1.0}.get(fault, 0.0),
            fail=0.3 if fault == "reads fail" else 0.0,
            late_s=(0.0, 3.0),
            slow=0.5 if fault == "reads are late" else 0.0,
            slow_s=(1.0, 2 * KEPT_S),
        )

    @rule()
    def mend_the_network(self) -> None:
        self.heal()

    def teardown(self) -> None:
        if not hasattr(self, "machines"):
            return
        self.heal()
        self.pass_time(3 * PATIENCE_S + CONNECT_S)
        assert not self.reads, "a read neither ends nor fails"
        self.pass_time(2 * KEPT_S)
        for name, gpu in self.gpus.items():
            assert gpu.num_free == (NUM_BUFFERS, NUM_BUFFERS), name


TestStaged = pytest.mark.slow(StagedMachine.TestCase)
TestStaged.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)

"""Engines that read each other through pinned memory, with stand-ins for GPUs and for the network between the hosts."""

from __future__ import annotations

import ctypes
import random
from typing import cast

import numpy as np

from baton.kv_transfer.transports import PeerState, RangeTable, ReadState
from baton.kv_transfer.transports.common import Scratch
from baton.kv_transfer.transports.staged import StagedTransport
from baton.kv_transfer.transports.staged_buffers import BounceBuffers

from ...helpers.fake_transport import FakeFabric, FakeHostNetwork, TransportFaults
from ...helpers.virtual_clock import VirtualClock

SIZE, BUFFER, NUM_BUFFERS = 4096, 64, 4
WHOLE = [(0, 0, SIZE)]


class LateCopies:
    """Stands in for a GPU: its copies land one after the other, each after its time."""

    def __init__(self, clock: VirtualClock, seconds: float = 0.0) -> None:
        self._clock = clock
        self._busy_until = 0.0
        self.seconds = seconds
        self.num_running = 0
        self.fails = False

    def begin(self, buffers: RangeTable) -> dict[str, bool]:
        copy = {"ended": False}
        self.num_running += 1

        def land() -> None:
            for source, target, num_bytes in buffers.tolist():
                ctypes.memmove(target, source, num_bytes)
            copy["ended"] = True
            self.num_running -= 1

        self._busy_until = max(self._busy_until, self._clock()) + self.seconds
        self._clock.after(self._busy_until - self._clock(), land)
        return copy

    def has_ended(self, copy: dict[str, bool]) -> bool:
        if self.fails:
            raise RuntimeError("an illegal memory access was encountered")
        return copy["ended"]

    def wait(self) -> None: ...


class Gpu:
    """An engine whose memory is read, and which reads, through host memory."""

    def __init__(self, machines: Machines, name: str) -> None:
        clock = machines.clock
        self.bytes = np.full(SIZE, ord(name[0]), dtype=np.uint8)
        self.address, self.num_bytes, self.device = self.bytes.ctypes.data, SIZE, "cuda:0"
        buffers = BounceBuffers.allocate("cpu", BUFFER, NUM_BUFFERS)
        host = memoryview((ctypes.c_char * buffers.num_bytes).from_address(buffers.address)).cast("B")
        machines.fabric.attach(name, cast(bytearray, host))
        self.network = FakeHostNetwork(machines.fabric, name)
        self.down, self.up = LateCopies(clock), LateCopies(clock)
        self._scratch = np.empty(BUFFER, dtype=np.uint8)
        scratch = Scratch(self._scratch.ctypes.data, self._scratch)
        self.transport = StagedTransport(self, self.network, buffers, self.down, self.up, scratch, clock)

    @property
    def num_free(self) -> tuple[int, int]:
        return self.transport.num_free


class Machines:
    def __init__(self, seed: int = 0) -> None:
        self.clock = VirtualClock()
        self.fabric = FakeFabric(self.clock, random.Random(seed), TransportFaults())
        self.holder, self.reader = Gpu(self, "holder"), Gpu(self, "reader")
        self.holder.bytes[:] = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)

    def pass_time(self, seconds: float = 0.1, step_s: float = 0.01) -> None:
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            self.holder.transport.progress()
            self.reader.transport.progress()

    def connect(self, reader: Gpu | None = None, holder: Gpu | None = None) -> int:
        """Connect the reader, or another, to the holder, or to another."""
        reads, read = (reader or self.reader).transport, (holder or self.holder).transport
        peer = reads.add_peer(read.metadata())
        for _ in range(300):
            if reads.peer_state(peer) is not PeerState.CONNECTING:
                break
            read.progress()
            self.pass_time(0.01)
        return peer

    def finish(self, read: int, seconds: float = 100.0) -> ReadState:
        """Return the state of a read once it has ended, or after that time."""
        for _ in range(round(seconds / 0.01)):
            if (state := self.reader.transport.poll(read)) is not ReadState.RUNNING:
                return state
            self.pass_time(0.01)
        return ReadState.RUNNING

    def check_all_free(self) -> None:
        self.pass_time(1.0)
        assert self.holder.num_free == self.reader.num_free == (NUM_BUFFERS, NUM_BUFFERS)

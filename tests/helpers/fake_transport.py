"""An in-process `Transport`: several engines' memories, read in virtual time, with faults, and without NIXL."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from baton.kv_transfer import codec
from baton.kv_transfer.errors import TransportError
from baton.kv_transfer.transports import ByteRange, Lane, PeerHandle, PeerState, Ranges, ReadHandle, ReadState

from .virtual_clock import VirtualClock


@dataclasses.dataclass
class TransportFaults:
    """Fault rates. Probabilities are per read; times in seconds are drawn uniformly from their range."""

    connect_s: tuple[float, float] = (0.0, 0.0)
    read_s: tuple[float, float] = (0.0, 0.0)
    slow: float = 0.0  # the read takes `slow_s` instead
    slow_s: tuple[float, float] = (0.0, 0.0)
    fail: float = 0.0  # the read reports failure half-way ...
    late_s: tuple[float, float] = (0.0, 0.0)  # ... and its remaining bytes land up to this much later
    corrupt: float = 0.0  # one byte of one range is changed
    refuse: float = 0.0  # `read` raises
    break_peer: float = 0.0  # connecting fails
    lose: float = 0.0  # a message does not arrive


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    name: str


_decode_metadata: Callable[[bytes], _Metadata] = codec.decoder(_Metadata, "metadata of a fake peer")


class FakeFabric:
    """All memories by agent name. `on_write(agent, offset, num_bytes)` sees every byte that lands anywhere."""

    def __init__(
        self, clock: VirtualClock, rng: random.Random, faults: TransportFaults | None = None, *, helped: bool = False
    ) -> None:
        """Create the fabric. `helped`: connections and reads end only if the remote agent makes progress, as by TCP."""
        self.clock = clock
        self._helped = helped
        self._waiting: dict[str, list[Callable[[], None]]] = {}  # actions that wait for an agent's progress, by agent
        self.rng = rng
        self.faults = faults or TransportFaults()
        self.on_write: Callable[[str, int, int], None] = lambda agent, offset, num_bytes: None
        self._memories: dict[str, bytearray] = {}
        self._messages: dict[str, list[tuple[str, bytes]]] = {}

    def post(self, sender: str, name: str, message: bytes) -> None:
        """Deliver a message between agents, at once and in order, unless the dial loses it."""
        if name in self._memories and self.rng.random() >= self.faults.lose:
            self._messages.setdefault(name, []).append((sender, message))

    def take_messages(self, name: str) -> list[tuple[str, bytes]]:
        return self._messages.pop(name, [])

    def attach(self, name: str, memory: bytearray, bytes_per_s: float | None = None) -> FakeTransport:
        self._memories[name] = memory
        return FakeTransport(self, name, bytes_per_s)

    def kill(self, name: str) -> None:
        """End an agent's process: nobody reads its memory any more, and nothing lands in it."""
        self._memories.pop(name, None)
        self.help(name)

    def with_help_of(self, name: str, action: Callable[[], None]) -> None:
        """Run an action as soon as the agent makes progress, or has been killed."""
        if self._helped and name in self._memories:
            self._waiting.setdefault(name, []).append(action)
        else:
            action()

    def help(self, name: str) -> None:
        for action in self._waiting.pop(name, []):
            action()

    def memory(self, name: str) -> bytearray | None:
        return self._memories.get(name)

    def copy(self, source: str, target: str, piece: ByteRange, *, corrupt: bool) -> None:
        read, written = self._memories.get(source), self._memories.get(target)
        if read is None or written is None:
            return
        data = bytearray(read[piece.remote : piece.remote + piece.num_bytes])
        if corrupt:
            data[self.rng.randrange(len(data))] ^= 0xFF
        written[piece.local : piece.local + piece.num_bytes] = data
        self.on_write(target, piece.local, piece.num_bytes)


@dataclasses.dataclass(slots=True)
class _Read:
    peer: PeerHandle
    source: str
    pieces: list[ByteRange]
    corrupt: bool
    state: ReadState = ReadState.RUNNING
    landed: bool = False  # the last write has happened


class FakeTransport:
    """A `Transport` of a `FakeFabric`."""

    name = "fake"
    num_fallbacks = 0

    def __init__(self, fabric: FakeFabric, agent: str, bytes_per_s: float | None = None) -> None:
        """Register an agent's memory. `bytes_per_s` is the rate reported for every connected peer."""
        self._bytes_per_s = bytes_per_s
        self._fabric = fabric
        self._agent = agent
        self._ids = itertools.count(1)
        self._peers: dict[PeerHandle, tuple[str, PeerState]] = {}
        self._reads: dict[ReadHandle, _Read] = {}

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def metadata(self) -> bytes:
        return codec.encode(_Metadata(self._agent))

    def add_peer(self, metadata: bytes) -> PeerHandle:
        name = _decode_metadata(metadata).name
        peer = next(self._ids)
        self._peers[peer] = (name, PeerState.CONNECTING)
        broken = self._fabric.rng.random() < self._fabric.faults.break_peer
        state = PeerState.BROKEN if broken else PeerState.CONNECTED
        connected = functools.partial(self._fabric.with_help_of, name, lambda: self._connected(peer, state))
        self._after(self._fabric.faults.connect_s, connected)
        return peer

    def peer_state(self, peer: PeerHandle) -> PeerState:
        return self._peers[peer][1]

    def lane(self, peer: PeerHandle) -> Lane | None:
        is_connected = self.peer_state(peer) is PeerState.CONNECTED
        return Lane(self.name, self._bytes_per_s) if is_connected else None

    def remove_peer(self, peer: PeerHandle) -> None:
        assert all(read.peer != peer for read in self._reads.values()), "a read of this peer is left"
        del self._peers[peer]

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        source = self._peers[peer][0]
        pieces = [ByteRange(*row) for row in np.asarray(ranges).tolist()]
        faults, rng = self._fabric.faults, self._fabric.rng
        self._check(source, pieces)
        if rng.random() < faults.refuse:
            raise TransportError("this read is refused, as the fault dial says")
        handle = next(self._ids)
        read = self._reads[handle] = _Read(peer, source, pieces, corrupt=rng.random() < faults.corrupt)
        seconds = faults.slow_s if rng.random() < faults.slow else faults.read_s
        if rng.random() < faults.fail:
            self._after(seconds, lambda: self._fail_half_way(read))
        else:
            self._after(seconds, lambda: self._fabric.with_help_of(source, lambda: self._finish(read)))
        return handle

    def poll(self, read: ReadHandle) -> ReadState:
        return self._reads[read].state

    def release(self, read: ReadHandle) -> bool:
        entry = self._reads[read]
        assert entry.state is not ReadState.RUNNING, "a read that runs may still write"
        if not entry.landed:
            return False
        del self._reads[read]
        return True

    def progress(self) -> None:
        self._fabric.help(self._agent)

    def close(self) -> None:
        self._fabric.kill(self._agent)

    def _after(self, seconds: tuple[float, float], action: Callable[[], None]) -> None:
        self._fabric.clock.after(self._fabric.rng.uniform(*seconds), action)

    def _connected(self, peer: PeerHandle, state: PeerState) -> None:
        if peer in self._peers:
            name = self._peers[peer][0]
            self._peers[peer] = (name, state if self._fabric.memory(name) is not None else PeerState.BROKEN)

    def _finish(self, read: _Read) -> None:
        alive = self._fabric.memory(read.source) is not None
        if alive:
            self._land(read, read.pieces)
        read.landed = True
        if alive:
            read.state = ReadState.DONE
        else:
            self._fail(read)

    def _fail_half_way(self, read: _Read) -> None:
        half = len(read.pieces) // 2
        self._land(read, read.pieces[:half])
        self._fail(read)

        def rest() -> None:
            self._land(read, read.pieces[half:])
            read.landed = True

        self._after(self._fabric.faults.late_s, rest)

    def _fail(self, read: _Read) -> None:
        read.state = ReadState.FAILED
        if read.peer in self._peers:
            self._peers[read.peer] = (read.source, PeerState.BROKEN)

    def _land(self, read: _Read, pieces: Sequence[ByteRange]) -> None:
        for number, piece in enumerate(pieces):
            self._fabric.copy(read.source, self._agent, piece, corrupt=read.corrupt and number == 0)

    def _check(self, source: str, ranges: Sequence[ByteRange]) -> None:
        remote, local = self._fabric.memory(source), self._fabric.memory(self._agent)
        for piece in ranges:
            if remote is not None and not 0 <= piece.remote <= len(remote) - piece.num_bytes:
                raise TransportError(f"{piece} is outside the {len(remote)} bytes of {source}")
            if local is not None and not 0 <= piece.local <= len(local) - piece.num_bytes:
                raise TransportError(f"{piece} is outside our {len(local)} bytes")


class FakeHostNetwork(FakeTransport):
    """A `HostNetwork` of a `FakeFabric`. It knows an agent as long as it is a peer, or introduced.

    An endpoint that has failed stays failed as long as its agent is known, as NIXL's do.
    """

    def __init__(self, fabric: FakeFabric, agent: str) -> None:
        super().__init__(fabric, agent)
        self._known: collections.Counter[str] = collections.Counter()
        self._failed: set[str] = set()

    def add_peer(self, metadata: bytes) -> PeerHandle:
        self._known[_decode_metadata(metadata).name] += 1
        return super().add_peer(metadata)

    def remove_peer(self, peer: PeerHandle) -> None:
        name = self._peers[peer][0]
        super().remove_peer(peer)
        self.remove_agent(name)

    def add_agent(self, metadata: bytes) -> str:
        name = _decode_metadata(metadata).name
        self._known[name] += 1
        return name

    def remove_agent(self, name: str) -> None:
        assert self._known[name] > 0, f"{name} is not known"
        self._known[name] -= 1
        if not self._known[name]:
            self._failed.discard(name)

    def send(self, name: str, message: bytes) -> None:
        if not self._known[name]:
            raise TransportError(f"{name} is not known")
        self._fabric.post(self._agent, name, message)

    def messages(self) -> list[tuple[str, bytes]]:
        return self._fabric.take_messages(self._agent)

    def _connected(self, peer: PeerHandle, state: PeerState) -> None:
        if peer in self._peers:
            super()._connected(peer, PeerState.BROKEN if self._peers[peer][0] in self._failed else state)

    def _fail(self, read: _Read) -> None:
        super()._fail(read)
        self._failed.add(read.source)

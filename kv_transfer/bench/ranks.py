"""The processes of the transfer benchmark: each rank has memory, its part of a connector, and raw NIXL."""

from __future__ import annotations

import dataclasses
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from baton.engine.core.connector import Received
from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.net.curve import ClusterKey

from ..connector import PeerInfo, TransferConnector
from ..descriptors import HeadSlice, assign_heads, block_ranges, slice_heads
from ..errors import TransferError
from ..group.read_member import join_tp_read_group
from ..group.rpc import GroupRank, GroupSocket
from ..settings import LocalEngine
from .stages import HandoffStage, StampedConnector

ANSWER_TIMEOUT_S = 60.0

Prompt = tuple[list[int], list[int]]  # the holder's blocks, the reader's


class BenchFailed(TransferError):
    """A hand-off of the benchmark failed, or delivered wrong bytes."""


@dataclasses.dataclass
class _Memory:
    address: int
    device: str
    owner: Any  # keeps it alive

    @classmethod
    def allocate(cls, num_bytes: int, device: str, index: int, seed: int) -> _Memory:
        if device == "cpu":
            array = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
            return cls(array.ctypes.data, "cpu", array)
        import torch

        place = f"cuda:{index % torch.cuda.device_count()}"
        tensor = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=place)
        torch.cuda.synchronize(place)
        return cls(tensor.data_ptr(), place, tensor)

    @property
    def nixl(self) -> tuple[str, int]:
        """NIXL's memory type and device number."""
        return ("DRAM", 0) if self.device == "cpu" else ("VRAM", int(self.device.partition(":")[2]))

    def read(self, offset: int, num_bytes: int) -> bytes:
        piece = self.owner[offset : offset + num_bytes]
        return bytes((piece if self.device == "cpu" else piece.cpu().numpy()).tobytes())


def _raw_agent(name: str, memory: _Memory, num_bytes: int) -> Any:
    """Make an agent with NIXL's own API, without any code of Baton."""
    from nixl._api import nixl_agent, nixl_agent_config

    kind, device = memory.nixl
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(memory.address, num_bytes, device, "")], kind)
    return agent


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSpec:
    """The parameters of one rank's process."""

    side: str
    layout: KVLayout
    num_blocks: int
    device: str
    first_device: int
    key: ClusterKey
    size: int
    rank: int = 0
    leader: str = ""  # the address of rank 0's `GroupSocket`
    stamped: bool = False  # rank 0 stamps each stage

    @property
    def heads(self) -> range:
        return self.layout.heads_of(self.rank, self.size)

    @property
    def block_bytes(self) -> int:
        return len(self.heads) * self.layout.head_bytes


class _Raw(msgspec.Struct, frozen=True):
    """The description of another raw NIXL agent."""

    metadata: bytes
    address: int
    nixl: tuple[str, int]


@dataclasses.dataclass(frozen=True)
class _Source:
    """Heads that a rank of the reader reads from one rank of the holder."""

    peer: Any  # NIXL's name for it
    raw: _Raw
    piece: HeadSlice


class _Rank:
    """One rank of either side, in its own process: memory, its part of a connector, and an agent for raw NIXL."""

    def __init__(self, spec: RankSpec, tell_address: Callable[[str], None]) -> None:
        num_bytes = spec.num_blocks * spec.block_bytes
        self._spec = spec
        self._memory = _Memory.allocate(num_bytes, spec.device, spec.first_device + spec.rank, seed=spec.first_device)
        address, device, heads = self._memory.address, self._memory.device, spec.heads
        region = CacheRegion.of(ArenaRegion(address, spec.num_blocks, device, spec.layout, heads.start, len(heads)))
        if spec.rank == 0:
            self._lead(region, tell_address)
        else:
            self._member = join_tp_read_group(
                region, GroupRank(spec.rank, spec.size, spec.key), leader=spec.leader, engine_id=spec.side
            )
        self._raw = _raw_agent(f"raw {spec.side} {spec.rank}", self._memory, num_bytes)
        self._sources: list[_Source] = []

    def _lead(self, region: CacheRegion, tell_address: Callable[[str], None]) -> None:
        spec, read_socket = self._spec, None
        if spec.size > 1:
            read_socket = GroupSocket(spec.size, "127.0.0.1", spec.key)
            tell_address(read_socket.address)
        self._event = threading.Event()
        make = StampedConnector if spec.stamped else TransferConnector
        self._connector = make(
            region,
            LocalEngine(spec.side, 1, "127.0.0.1", spec.key),
            wake=self._on_event,
            read_socket=read_socket,
        )

    def _on_event(self) -> None:
        self._stamp(HandoffStage.ENGINE_NOTIFIED)
        self._event.set()

    def _stamp(self, stage: HandoffStage) -> None:
        if isinstance(self._connector, StampedConnector):
            self._connector.stamps.note(stage)

    def idle(self) -> None:
        """Make progress, because over some lanes raw NIXL needs the CPU of the process that is read."""
        self._raw.get_new_notifs()
        if self._spec.rank == 0:
            self._connector.poll()

    def address(self) -> str:
        return self._connector.address

    def raw(self) -> _Raw:
        return _Raw(self._raw.get_agent_metadata(), self._memory.address, self._memory.nixl)

    def meet(self, holders: Sequence[_Raw], kept: Sequence[range], address: str) -> None:
        spec = self._spec
        for assigned in assign_heads(spec.rank, spec.heads, kept):
            holder = holders[assigned.holder_rank]
            piece = slice_heads(spec.layout, assigned.heads, kept[assigned.holder_rank], spec.heads)
            self._sources.append(_Source(self._raw.add_remote_agent(holder.metadata), holder, piece))
        if spec.rank == 0:
            self._connector.peers_changed([PeerInfo("holder", 1, address, spec.layout.fingerprint)])

    def offer(self, prompts: Sequence[list[int]]) -> list[bytes]:
        size = self._spec.layout.block_size
        return [self._connector.offer("bench", 0, blocks, len(blocks) * size).ticket for blocks in prompts]

    def receive(self, tickets: Sequence[bytes], targets: Sequence[list[int]]) -> float:
        """Receive blocks, and return the seconds until all are here."""
        self._stamp(HandoffStage.ASKED)
        begin = time.perf_counter()
        waiting = {
            self._connector.receive("bench", 0, ticket, 0, target)
            for ticket, target in zip(tickets, targets, strict=True)
        }
        while waiting:
            if not self._event.wait(ANSWER_TIMEOUT_S):
                raise BenchFailed(f"nothing was received within {ANSWER_TIMEOUT_S:g} s")
            self._event.clear()
            for event in self._connector.poll():
                if not isinstance(event, Received):
                    raise BenchFailed(f"a hand-off failed: {event}")
                waiting.remove(event.transfer_id)
        seconds = time.perf_counter() - begin
        self._stamp(HandoffStage.ANSWERED)
        return seconds

    def stages(self) -> dict[HandoffStage, float]:
        """Return the stamps since the last call, in seconds of the machine's clock. Only for a stamped rank 0."""
        assert isinstance(self._connector, StampedConnector), "asked of a rank that is not stamped"
        return self._connector.stamps.take()

    def receive_raw(self, prompts: Sequence[Prompt]) -> float:
        """Read with raw NIXL, and return the seconds until this rank's share of all blocks is here."""
        ranges = [(source, block_ranges(*prompt, source.piece)) for prompt in prompts for source in self._sources]
        begin = time.perf_counter()
        running = [self._post_raw(source, np.asarray(pieces, dtype=np.int64)) for source, pieces in ranges]
        for handle, state in running:
            while state == "PROC":
                state = self._raw.check_xfer_state(handle)
            if state != "DONE":
                raise BenchFailed(f"raw NIXL says {state}")
        return time.perf_counter() - begin

    def num_descriptors(self, prompts: Sequence[Prompt]) -> int:
        return sum(len(block_ranges(*prompt, source.piece)) for prompt in prompts for source in self._sources)

    def heads_of(self, block: int) -> dict[int, bytes]:
        """Return the bytes of each head of a block."""
        spec = self._spec
        held = self._memory.read(block * spec.block_bytes, spec.block_bytes)
        size = spec.layout.head_bytes
        return {head: held[place * size : (place + 1) * size] for place, head in enumerate(spec.heads)}

    def _post_raw(self, source: _Source, pieces: np.ndarray) -> tuple[Any, str]:
        kind, device = self._memory.nixl
        remote_kind, remote_device = source.raw.nixl
        local, remote = np.empty(pieces.shape, dtype=np.uint64), np.empty(pieces.shape, dtype=np.uint64)
        remote[:, 0], remote[:, 1], remote[:, 2] = pieces[:, 0] + source.raw.address, pieces[:, 2], remote_device
        local[:, 0], local[:, 1], local[:, 2] = pieces[:, 1] + self._memory.address, pieces[:, 2], device
        ours, theirs = self._raw.get_xfer_descs(local, kind), self._raw.get_xfer_descs(remote, remote_kind)
        handle = self._raw.initialize_xfer("READ", ours, theirs, source.peer)
        return handle, self._raw.transfer(handle)


def _serve(pipe: Connection, spec: RankSpec) -> None:
    rank = _Rank(spec, pipe.send)
    pipe.send("ready")
    while True:
        while not pipe.poll(0.001):
            rank.idle()
        method, arguments = pipe.recv()
        pipe.send(getattr(rank, method)(*arguments))


class RankProcess:
    """A `_Rank` in another process. `order` and `answer` are the two halves of a call."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, spec), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, method: str, *arguments: object) -> Any:
        self.order(method, *arguments)
        return self.answer()

    def order(self, method: str, *arguments: object) -> None:
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise BenchFailed(f"rank {self.spec.rank} of the {self.spec.side} did not answer in {ANSWER_TIMEOUT_S:g} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise BenchFailed(f"rank {self.spec.rank} of the {self.spec.side} has ended") from None


class Ranks:
    """The processes of a measurement. All of them end with the context."""

    def __init__(self) -> None:
        self._running: list[RankProcess] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in reversed(self._running):  # readers first: they would report that the holder is lost
            rank.process.kill()
            rank.process.join()

    def start(self, spec: RankSpec) -> list[RankProcess]:
        """Start a group, and return its processes by rank. Raises `UnevenHeads`."""
        spec.layout.heads_of(0, spec.size)
        leader = self._start(spec)
        if spec.size == 1:
            group = [leader]
        else:
            address = leader.answer()
            others = [dataclasses.replace(spec, rank=rank, leader=address) for rank in range(1, spec.size)]
            group = [leader, *map(self._start, others)]
        for rank in group:
            rank.answer()  # it is ready
        return group

    def _start(self, spec: RankSpec) -> RankProcess:
        self._running.append(RankProcess(spec))
        return self._running[-1]

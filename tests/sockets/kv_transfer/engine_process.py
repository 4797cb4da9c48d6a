"""The KV transfers of an engine without a model, in a process per rank: memory, NIXL, and a pipe for calls."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from baton.engine.core.connector import ConnectorEvent, Offer, Received
from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.connector import PeerInfo, TransferSettings, TransferStats
from baton.kv_transfer.errors import TransferThreadDied
from baton.kv_transfer.group.read_member import join_tp_read_group
from baton.kv_transfer.group.rpc import GroupRank, GroupSocket
from baton.kv_transfer.settings import LocalEngine
from baton.kv_transfer.staging.host_buffer import open_connector

from ...helpers.process_context import FORKING

START_S = 60.0
DEFAULT_SETTINGS = TransferSettings()


def untimed(events: Sequence[ConnectorEvent]) -> list[ConnectorEvent]:
    """Return the events without their times."""
    return [Received(event.transfer_id) if isinstance(event, Received) else event for event in events]


@dataclasses.dataclass(frozen=True)
class RankSetup:
    """The configuration of one rank's process."""

    name: str
    layout: KVLayout
    key: ClusterKey
    epoch: int = 1
    num_blocks: int = 32
    settings: TransferSettings = DEFAULT_SETTINGS
    rank: int = 0
    size: int = 1
    leader: str = ""  # the address of rank 0's `GroupSocket`
    environ: tuple[tuple[str, str], ...] = ()
    device: str = "cpu"  # or "cuda": rank n has GPU n modulo their number


class Memory:
    """The memory of one rank: [block, head, byte], zeros at first."""

    def __init__(self, setup: RankSetup, num_heads: int) -> None:
        self._shape = (setup.num_blocks, num_heads, setup.layout.head_bytes)
        self._array: Any
        if setup.device == "cpu":
            self._array = np.zeros(self._shape, dtype=np.uint8)
            self.device, self.address = "cpu", self._array.ctypes.data
            return
        import torch

        self.device = f"cuda:{setup.rank % torch.cuda.device_count()}"
        self._array = torch.zeros(self._shape, dtype=torch.uint8, device=self.device)
        self.address = self._array.data_ptr()
        torch.cuda.synchronize(self.device)

    def write(self, values: np.ndarray) -> None:
        if self.device == "cpu":
            self._array[:] = values
            return
        import torch

        self._array.copy_(torch.from_numpy(np.ascontiguousarray(values)))
        torch.cuda.synchronize(self.device)  # reads by other processes do not wait for this process's streams

    def spoil(self, block: int) -> None:
        """Change one byte of the block's last head."""
        self._array[block, -1, 0] ^= 0xFF
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize(self.device)

    def read(self, blocks: Sequence[int]) -> np.ndarray:
        found = self._array[list(blocks)]
        return found if self.device == "cpu" else found.cpu().numpy()


class Child:
    """The object in each process, whose public methods the test calls through a pipe."""

    def __init__(self, setup: RankSetup, pipe: multiprocessing.connection.Connection) -> None:
        self.layout, self.heads = setup.layout, setup.layout.heads_of(setup.rank, setup.size)
        self.num_blocks = setup.num_blocks
        self.memory = Memory(setup, len(self.heads))
        region = CacheRegion.of(
            ArenaRegion(
                self.memory.address,
                setup.num_blocks,
                self.memory.device,
                self.layout,
                self.heads.start,
                len(self.heads),
            )
        )
        self.info: PeerInfo | None = None
        if setup.rank == 0:
            self._lead(setup, region, pipe)
        else:
            self.member = join_tp_read_group(
                region,
                GroupRank(setup.rank, setup.size, setup.key),
                leader=setup.leader,
                engine_id=setup.name,
                settings=setup.settings,
            )

    def _lead(self, setup: RankSetup, region: CacheRegion, pipe: multiprocessing.connection.Connection) -> None:
        read_socket = None
        if setup.size > 1:
            read_socket = GroupSocket(setup.size, "127.0.0.1", setup.key)
            pipe.send(read_socket.address)
        self.news = threading.Event()
        self.connector = open_connector(
            region,
            LocalEngine(setup.name, setup.epoch, "127.0.0.1", setup.key),
            settings=setup.settings,
            wake=self.news.set,
            read_socket=read_socket,
        )
        self.info = PeerInfo(setup.name, setup.epoch, self.connector.address, self.layout.fingerprint)

    def fill(self, seed: int) -> None:
        """Fill memory with random bytes, which are the same for a head on every rank."""
        shape = (self.num_blocks, self.layout.num_kv_heads, self.layout.head_bytes)
        rng = np.random.default_rng(seed)
        self.memory.write(rng.integers(0, 256, shape, dtype=np.uint8)[:, self.heads.start : self.heads.stop])

    def share(self, blocks: Sequence[int]) -> tuple[range, np.ndarray]:
        """Return this rank's heads, and their content in the blocks: [block, head, byte]."""
        return self.heads, self.memory.read(blocks)

    def digest(self, blocks: Sequence[int]) -> bytes:
        """Return a digest of the content of the blocks, which may be too large for a pipe."""
        return hashlib.blake2b(self.memory.read(blocks)).digest()

    def spoil(self, block: int) -> None:
        self.memory.spoil(block)

    def offer(self, request_id: str, blocks: Sequence[int]) -> Offer:
        return self.connector.offer(request_id, 0, blocks, len(blocks) * self.layout.block_size)

    def offer_growing(self, request_id: str, blocks: Sequence[int]) -> Offer:
        return self.connector.offer_growing(request_id, 0, blocks, len(blocks) * self.layout.block_size)

    def advance(self, transfer_id: int, num_ready: int) -> None:
        self.connector.advance(transfer_id, num_ready)

    def receive(self, ticket: bytes, first_block: int, blocks: Sequence[int]) -> int:
        return self.connector.receive("any", 0, ticket, first_block, blocks)

    def cancel(self, transfer_id: int) -> None:
        self.connector.cancel(transfer_id)

    def withdraw(self, transfer_id: int) -> None:
        self.connector.withdraw(transfer_id)

    def peers_changed(self, live: list[PeerInfo]) -> None:
        self.connector.peers_changed(live)

    def stats(self) -> TransferStats:
        return self.connector.stats()

    def events(self, count: int, timeout_s: float) -> list[ConnectorEvent]:
        """Return the next events: `count` of them, or fewer after `timeout_s`."""
        deadline, found = time.monotonic() + timeout_s, list(self.connector.poll())
        while len(found) < count and time.monotonic() < deadline:
            self.news.wait(deadline - time.monotonic())
            self.news.clear()
            found += self.connector.poll()
        return untimed(found)

    def last_words(self, timeout_s: float) -> tuple[list[ConnectorEvent], str]:
        """Return the events until the transfer thread has died, and the reason; "" if it lives on."""
        deadline, found = time.monotonic() + timeout_s, []
        while time.monotonic() < deadline:
            try:
                found += self.connector.poll()
            except TransferThreadDied as error:
                return found, str(error)
            time.sleep(0.01)
        return found, ""

    def close(self) -> None:
        (self.member if self.info is None else self.connector).close()


def _serve(orders: multiprocessing.connection.Connection, setup: RankSetup) -> None:
    os.environ.update(setup.environ)  # UCX reads these variables when a transport is made
    child = Child(setup, orders)
    orders.send(child.info)
    while True:
        method, values = orders.recv()
        orders.send(getattr(child, method)(*values))
        if method == "close":
            return


class RankProcess:
    """One rank's process. `rank.order("offer", "r", [1, 2])` calls a method of its `Child`."""

    def __init__(self, setup: RankSetup) -> None:
        self._pipe, theirs = FORKING.Pipe()
        self.process = FORKING.Process(target=_serve, args=(theirs, setup), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the engine process did not answer within {timeout_s} s")
        return self._pipe.recv()

    def order(self, method: str, *values: Any) -> Any:
        self._pipe.send((method, values))
        return self.answer(30.0)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)


class EngineProcess:
    """The processes of an engine. Methods such as `engine.offer("r", [1, 2])` call rank 0's `Child`."""

    def __init__(
        self,
        name: str,
        key: ClusterKey,
        layout: KVLayout,
        *,
        size: int = 1,
        **options: Any,
    ) -> None:
        self.layout, self.size = layout, size
        setup = RankSetup(name, layout, key, size=size, **options)
        self.ranks = [RankProcess(setup)]
        if size > 1:
            leader = self.ranks[0].answer(START_S)
            for rank in range(1, size):
                self.ranks.append(RankProcess(dataclasses.replace(setup, rank=rank, leader=leader)))

    @functools.cached_property
    def info(self) -> PeerInfo:
        """Wait until the processes have started. Engines start in parallel, as only this property waits."""
        info, *_ = [rank.answer(START_S) for rank in self.ranks]
        return info

    def fill(self, seed: int) -> None:
        assert self.info
        for rank in self.ranks:
            rank.order("fill", seed)

    def content(self, blocks: Sequence[int]) -> bytes:
        """Return the content of all heads. Ranks that keep the same head must agree."""
        assert self.info
        heads: dict[int, np.ndarray] = {}
        for rank in self.ranks:
            kept, share = rank.order("share", blocks)
            for place, head in enumerate(kept):
                assert np.array_equal(heads.setdefault(head, share[:, place]), share[:, place]), (
                    f"copies of head {head}"
                )
        return np.stack([heads[head] for head in sorted(heads)], axis=1).tobytes()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def order(*values: Any) -> Any:
            assert self.info
            return self.ranks[0].order(method, *values)

        return order

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

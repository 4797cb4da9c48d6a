"""An engine's transfer half in a process of its own: memory, a connector over NIXL, and a pipe for orders."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from baton.engine.core.connector import ConnectorEvent, Offer
from baton.engine.core.layout import KVLayout, KVRegion
from baton.kv_transfer.connector import PeerInfo, TransferConnector, TransferSettings, TransferStats
from baton.kv_transfer.curve import ClusterKey

START_S = 60.0


class Child:
    """What runs in the process. Every public method is an order."""

    def __init__(
        self, name: str, epoch: int, key: ClusterKey, layout: KVLayout, num_blocks: int, settings: TransferSettings
    ) -> None:
        self.memory = np.zeros((num_blocks, layout.block_bytes), dtype=np.uint8)
        self.layout = layout
        self.news = threading.Event()
        region = KVRegion(self.memory.ctypes.data, num_blocks, "cpu", layout)
        self.connector = TransferConnector(
            region, engine_id=name, epoch=epoch, host="127.0.0.1", key=key, settings=settings, wake=self.news.set
        )
        self.info = PeerInfo(name, epoch, self.connector.address, layout.fingerprint)

    def who(self) -> PeerInfo:
        return self.info

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.memory[:] = rng.integers(0, 256, self.memory.shape, dtype=np.uint8)

    def content(self, blocks: Sequence[int]) -> bytes:
        return self.memory[list(blocks)].tobytes()

    def offer(self, request_id: str, blocks: Sequence[int]) -> Offer:
        return self.connector.offer(request_id, 0, blocks, len(blocks) * self.layout.block_size)

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
        """The next events, at most `count`; fewer where they do not come in time."""
        deadline, found = time.monotonic() + timeout_s, list(self.connector.poll())
        while len(found) < count and time.monotonic() < deadline:
            self.news.wait(deadline - time.monotonic())
            self.news.clear()
            found += self.connector.poll()
        return found

    def close(self) -> None:
        self.connector.close()


def _serve(orders: multiprocessing.connection.Connection, *arguments: Any) -> None:
    child = Child(*arguments)
    orders.send(child.who())
    while True:
        method, values = orders.recv()
        orders.send(getattr(child, method)(*values))
        if method == "close":
            return


class EngineProcess:
    """Orders by name: `engine.offer("r", [1, 2])`. Killed on exit, whatever happened."""

    def __init__(self, name: str, key: ClusterKey, layout: KVLayout, **options: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        settings = options.get("settings", TransferSettings())
        arguments = (theirs, name, options.get("epoch", 1), key, layout, options.get("num_blocks", 32), settings)
        self.process = spawn.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()

    @functools.cached_property
    def info(self) -> PeerInfo:
        """Waits until the process is up, so that several may start at once."""
        return self._answer(START_S)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def order(*values: Any) -> Any:
            assert self.info
            self._pipe.send((method, values))
            return self._answer(30.0)

        return order

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the engine process did not answer within {timeout_s} s")
        return self._pipe.recv()

"""A host buffer over a connector whose actions the test controls."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from baton.engine.core.connector import ConnectorEvent, Offer, OfferEnded, OfferOutcome, TransferId
from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.connector import TransferSettings, TransferStats
from baton.kv_transfer.protocol.block_runs import encode_runs
from baton.kv_transfer.protocol.messages import DigestMode, EngineKey, LeaseKey
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket
from baton.kv_transfer.settings import LocalEngine
from baton.kv_transfer.staging.host_buffer import HostBufferConnector

LAYOUT = KVLayout(model="small", num_layers=2, num_kv_heads=2, head_dim=16, dtype="bfloat16")  # 4 KB a block
SLOTS = 8
BY_HOST = TransferSettings(buffer="host", buffer_bytes=SLOTS * LAYOUT.block_bytes)
PATIENCE_S = 40.0

ME = LocalEngine("holder", 1, "127.0.0.1", None)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


class Inner:
    """The connector below `HostBufferConnector`; the test controls its transfers."""

    offers_early = True
    address = "tcp://here"
    newest: Inner

    def __init__(self, region: CacheRegion, me: LocalEngine, **options: Any) -> None:
        Inner.newest = self
        self.region = region
        self.ids = itertools.count(1)
        self.events: list[ConnectorEvent] = []
        self.offered: dict[TransferId, list[int]] = {}
        self.ready: dict[TransferId, int] = {}
        self.received: dict[TransferId, list[int]] = {}
        self.cancelled: list[TransferId] = []

    def offer_growing(self, request_id: str, generation: int, block_ids: Any, num_tokens: int) -> Offer:
        transfer_id = next(self.ids)
        self.offered[transfer_id] = list(block_ids)
        lease = LeaseKey(EngineKey("holder", 1), request_id, generation, transfer_id)
        ticket = Ticket(
            version=TICKET_VERSION,
            lease=lease,
            kv_address=self.address,
            fingerprint="f",
            transport="t",
            num_tokens=num_tokens,
            lease_s=1.0,
            digest=DigestMode.OFF,
            num_ready=0,
            runs=encode_runs(block_ids),
        )
        return Offer(transfer_id, ticket.encode())

    def advance(self, transfer_id: TransferId, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        self.ready[transfer_id] = num_ready

    def withdraw(self, transfer_id: TransferId) -> None:
        self.end_offer(transfer_id, OfferOutcome.WITHDRAWN)

    def end_offer(self, transfer_id: TransferId, outcome: OfferOutcome) -> None:
        """End an offer and report that, once: a second call does nothing."""
        if self.offered.pop(transfer_id, None) is not None:
            self.events.append(OfferEnded(transfer_id, outcome))

    def receive(self, *arguments: Any) -> TransferId:
        transfer_id = next(self.ids)
        self.received[transfer_id] = list(arguments[-1])
        return transfer_id

    def cancel(self, transfer_id: TransferId) -> None:
        self.cancelled.append(transfer_id)

    def poll(self) -> list[ConnectorEvent]:
        events, self.events = self.events, []
        return events

    def stats(self) -> TransferStats:
        return TransferStats()

    def close(self) -> None:
        pass


class Station:
    """A `HostBufferConnector` of eight slots over sixteen blocks, on an `Inner`."""

    def __init__(self) -> None:
        self.now_s: float | None = None  # if set, the buffer's clock stands still at this time
        self.blocks = np.arange(16, dtype=np.uint8)[:, None].repeat(LAYOUT.block_bytes, axis=1)
        region = CacheRegion.of(ArenaRegion(self.blocks.ctypes.data, 16, "cpu", LAYOUT, 0, 2))
        self.woken = threading.Event()
        self.buffer = HostBufferConnector(region, ME, settings=BY_HOST, wake=self.woken.set, clock=self._clock)
        self.inner = Inner.newest

    def _clock(self) -> float:
        return time.monotonic() if self.now_s is None else self.now_s

    def slot(self, number: int) -> np.ndarray:
        size = LAYOUT.block_bytes
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.inner.region.address + number * size))

    def events(self, count: int) -> list[ConnectorEvent]:
        found: list[ConnectorEvent] = []

        def came() -> bool:
            found.extend(self.buffer.poll())
            return len(found) >= count

        wait_until(came)
        return found

    @property
    def slots_used(self) -> int:
        return self.buffer.stats().buffer_blocks

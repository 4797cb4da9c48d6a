"""Engines without devices: the real scheduler, with steps that take the time that a formula gives."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from baton.cluster.cached_blocks import CachedBlocks
from baton.cluster.contracts import EngineRecord, EngineView, Role
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    Offer,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
    TransferId,
)
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineOutput, EngineRequest, EngineStats
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.step import StepPlan
from baton.engine.core.tiers import KVTiers
from baton.engine.offline.bench_scheduler import result_of
from baton.kv_transfer.handoff.reads import MEASURED_S, ReadPace, TimedRead
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

from .traffic import VOCAB_SIZE

KV_TOKEN_BYTES = 128 << 10  # bytes of KV for one token of an 8B model
STATUS_PERIOD_S = 0.05  # equals `engines.status_publisher.STATUS_PERIOD_S`


@dataclass(frozen=True)
class Speed:
    """Times of steps and links. Defaults: an 8B model on an H200, in round numbers."""

    step_s: float = 0.0025  # for reading the weights once
    row_s: float = 0.00004  # for each decoding request, which reads its own KV
    prefill_tokens_per_s: float = 20_000.0
    handoff_s: float = 0.003
    kv_tokens_per_s: float = 1_000_000.0
    host_tokens_per_s: float = 160_000.0  # between the pool and the host's memory, in either direction
    disk_tokens_per_s: float = 40_000.0

    def of(self, plan: StepPlan) -> float:
        """Return the seconds of a step."""
        rows = sum(chunk.num_tokens == 1 for chunk in plan.chunks)
        tokens = sum(chunk.num_tokens for chunk in plan.chunks) - rows
        return max(self.step_s, tokens / self.prefill_tokens_per_s) + rows * self.row_s


@dataclass(frozen=True)
class SlowSpell:
    """A time in which all steps of an engine take `times` as long as otherwise."""

    times: float = 1.0
    begins_s: float = 0.0
    ends_s: float = math.inf

    def factor(self, now_s: float) -> float:
        return self.times if self.begins_s <= now_s < self.ends_s else 1.0


NEVER_SLOW = SlowSpell()


class VirtualTime:
    """A virtual clock that makes scheduled calls in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now_s + delay_s, next(self._count), call))

    def run(self) -> None:
        """Make all calls until none is left."""
        while self._calls:
            self.now_s, _, call = heapq.heappop(self._calls)
            call()


class VirtualNetwork:
    """The links between engines: each engine sends one prompt's KV at a time, and receives one at a time."""

    def __init__(self, time: VirtualTime, speed: Speed) -> None:
        self.time, self.speed = time, speed
        self.offers: dict[bytes, VirtualConnector] = {}  # by ticket
        self.connectors: dict[str, VirtualConnector] = {}  # by engine


class VirtualConnector:
    """A `KVConnector` whose transfers take time and never fail. It measures them as the real one does."""

    def __init__(self, engine: EngineRecord, network: VirtualNetwork) -> None:
        self._name, self._role, self._network = engine.engine_id, engine.role, network
        self._time, self._offers = network.time, network.offers
        network.connectors[self._name] = self
        self._ids = itertools.count()
        self._events: deque[ConnectorEvent] = deque()
        self._pulls: set[TransferId] = set()
        self._paces: dict[str, ReadPace] = {}  # by holder
        self._stats: TransferStats | None = None  # None: to be computed anew
        self._sends_until_s = self._takes_until_s = 0.0
        self.on_event: Callable[[], None] = lambda: None
        self.on_measured: Callable[[], None] = lambda: None

    def stats(self) -> TransferStats:
        """Return the statistics of transfers from all engines that this one may read."""
        holders = [each for each in self._network.connectors.values() if each._role is self._role.complement]
        if self._role is Role.DECODE and (self._stats is None or len(self._stats.lanes) != len(holders)):
            self._stats = TransferStats(lanes=[self._lane(each._name) for each in holders])
        return self._stats or TransferStats()

    def _lane(self, holder: str) -> PeerLane:
        pace = self._pace(holder)
        lane = PeerLane(engine_id=holder, transport="virtual", bytes_per_s=None, is_slow=False)
        return msgspec.structs.replace(lane, num_reads=pace.num_reads, read_s=pace.line())

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        transfer_id = next(self._ids)
        ticket = f"{id(self)}/{transfer_id}".encode()
        self._offers[ticket] = self
        return Offer(transfer_id, ticket)

    def withdraw(self, transfer_id: TransferId) -> None:
        self._end(f"{id(self)}/{transfer_id}".encode(), OfferOutcome.WITHDRAWN)

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        transfer_id = next(self._ids)
        self._pulls.add(transfer_id)
        now_s, speed = self._time(), self._network.speed
        over_s = now_s
        if (source := self._offers.get(ticket)) is not None:
            began_s = max(now_s, source._sends_until_s, self._takes_until_s)
            seconds = len(block_ids) * BLOCK_SIZE / speed.kv_tokens_per_s
            over_s = source._sends_until_s = self._takes_until_s = began_s + seconds
            self._read(source._name, len(block_ids), began_s, seconds)
        self._time.after(over_s - now_s + speed.handoff_s, lambda: self._arrive(transfer_id, ticket))
        return transfer_id

    def cancel(self, transfer_id: TransferId) -> None:
        if transfer_id in self._pulls:
            self._fail(transfer_id, "cancelled")

    def poll(self) -> list[ConnectorEvent]:
        events = list(self._events)
        self._events.clear()
        return events

    def _pace(self, holder: str) -> ReadPace:
        if holder not in self._paces:
            rate = KV_TOKEN_BYTES * self._network.speed.kv_tokens_per_s  # as known when the two were paired
            self._paces[holder] = ReadPace(KV_TOKEN_BYTES * BLOCK_SIZE, rate, self._time())
        return self._paces[holder]

    def _read(self, holder: str, num_blocks: int, began_s: float, seconds: float) -> None:
        """Let blocks arrive, and measure them, in pieces of `MEASURED_S` as `BlockReads` does."""
        pace, asked_s = self._pace(holder), self._time()
        num_pieces = max(1, min(num_blocks, int(seconds / MEASURED_S)))
        came, since_s, before = 0, asked_s, pace.num_blocks

        def arrive(upto: int) -> None:
            nonlocal came, since_s, before
            pace.num_blocks += upto - came
            pace.measured([TimedRead(since_s, before)], (), self._time())
            came, since_s, before, self._stats = upto, self._time(), pace.num_blocks, None
            self.on_measured()

        for piece in range(1, num_pieces + 1):
            share = piece / num_pieces
            self._time.after(began_s - asked_s + share * seconds, functools.partial(arrive, round(share * num_blocks)))

    def _arrive(self, transfer_id: TransferId, ticket: bytes) -> None:
        if transfer_id not in self._pulls:
            return
        source = self._offers.get(ticket)
        if source is None:
            self._fail(transfer_id, "the offer is gone")
            return
        self._pulls.remove(transfer_id)
        source._end(ticket, OfferOutcome.FINISHED)
        self._push_event(Received(transfer_id))

    def _fail(self, transfer_id: TransferId, reason: str) -> None:
        self._pulls.remove(transfer_id)
        self._push_event(ReceiveFailed(transfer_id, reason))
        self._push_event(BlocksReleased(transfer_id))

    def _end(self, ticket: bytes, outcome: OfferOutcome) -> None:
        if self._offers.pop(ticket, None) is not None:
            self._push_event(OfferEnded(int(ticket.partition(b"/")[2]), outcome))

    def _push_event(self, event: ConnectorEvent) -> None:
        self._events.append(event)
        self.on_event()


class VirtualEngine:
    """One engine. Gateways know its last status, which it sends every `STATUS_PERIOD_S` while it works, and when its
    work begins and ends.
    """

    def __init__(
        self,
        record: EngineRecord,
        config: EngineCoreConfig,
        time: VirtualTime,
        speed: Speed,
        connector: VirtualConnector,
        publish: Callable[[EngineOutput], None],
        tiers: KVTiers | None = None,
        slow: SlowSpell = NEVER_SLOW,
    ) -> None:
        """`tiers` must call `wake` when a copy is done."""
        self.record = record
        self.prompt_tokens = 0  # computed ones, including repeated chunks
        self.busy_s = 0.0
        self._time, self._speed, self._publish = time, speed, publish
        self.slow = slow  # may change while the simulation runs
        self._connector = connector
        self._transfers = connector.stats()
        self._scheduler = Scheduler(config, connector, clock=time, tiers=tiers)
        self.block_log = self._scheduler.tier_copies.block_log()
        self._cached = CachedBlocks(config.num_blocks, record.num_tier_blocks)
        self._cached.apply(self.block_log.snapshot())
        self._stats = self._scheduler.stats()
        self._published_at_s = 0.0
        self._busy = False
        connector.on_event, connector.on_measured = self.wake, self._publish_if_idle

    @property
    def stats(self) -> EngineStats:
        """Return the present statistics, which may be newer than those that gateways know."""
        return self._scheduler.stats()

    @property
    def restored_tokens(self) -> int:
        tiers = self._scheduler.stats().tiers
        return 0 if tiers is None else tiers.restored_tokens

    def view(self, outstanding: int) -> EngineView:
        return EngineView(self.record, self._stats, outstanding, self._transfers, self._cached)

    def add(self, request: EngineRequest) -> None:
        self._scheduler.add(request)
        self.wake()

    def wake(self) -> None:
        """Wake the engine because there is something to do."""
        if not self._busy:
            self._busy = True
            self._publish_status()
            self._time.after(0.0, self._step)

    def _step(self) -> None:
        self._scheduler.poll_transfers()
        plan = self._scheduler.plan_step()
        if plan is None:
            self._busy = False
            self._publish_status()
            for output in self._scheduler.take_outputs():
                self._publish(output)
            return
        self.prompt_tokens += sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1)
        seconds = self._speed.of(plan) * self.slow.factor(self._time())
        self.busy_s += seconds
        self._time.after(seconds, lambda: self._settle(plan))

    def _settle(self, plan: StepPlan) -> None:
        outputs = self._scheduler.settle(result_of(plan))
        if self._time() - self._published_at_s >= STATUS_PERIOD_S:
            self._publish_status()
        for output in outputs:
            self._publish(output)
        self._step()

    def _publish_if_idle(self) -> None:
        """Publish the status, including the transfers' speed, if no step is running that would do so."""
        if not self._busy:
            self._publish_status()

    def _publish_status(self) -> None:
        self._published_at_s = self._time()
        self._stats = self._scheduler.stats()
        self._transfers = self._connector.stats()
        if (changes := self.block_log.take()) is not None:
            self._cached.apply(changes)


def make_record(rank: int, role: Role, num_blocks: int, num_tier_blocks: int = 0) -> EngineRecord:
    """Make the record of an engine; there are eight engines on each node."""
    name = f"{role}-{rank}"
    return EngineRecord(
        engine_id=name,
        group_id=name,
        epoch=rank,
        role=role,
        rank=rank,
        node_id=f"node-{rank // 8}",
        node_ip="",
        pid=0,
        address="",
        kv_address="",
        fingerprint="virtual",
        model_id="virtual",
        max_model_len=num_blocks * BLOCK_SIZE,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        num_blocks=num_blocks,
        num_tier_blocks=num_tier_blocks,
    )


def make_config(num_blocks: int) -> EngineCoreConfig:
    return EngineCoreConfig(
        num_blocks=num_blocks,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=num_blocks * BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        depth=1,
    )

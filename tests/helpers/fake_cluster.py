"""Real `EngineCore`s in this process, on `FakeRunner`s, with a link between their memories that may fail."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from baton.cluster.cached_blocks import CachedBlocks
from baton.cluster.contracts import (
    ClientCounters,
    DirectorySnapshot,
    EngineGone,
    EngineRecord,
    EngineView,
    GatewayRecord,
    Reach,
    Role,
)
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    GrowingConnector,
    Offer,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
    TransferId,
)
from baton.engine.core.engine import EngineCore, EngineFailed
from baton.engine.core.grammar import GrammarSource
from baton.engine.core.messages import (
    EngineError,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
)
from baton.engine.core.pace import StepTimes
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.speculation.drafter import Drafter
from baton.kv_transfer.protocol.stats import TransferStats

from .fake_runner import FakeRunner, Scripts

MOST_DRAFTS = 4  # drafts of a request in a step, where the engine drafts


@dataclass
class Wire:
    """The link between the engines' memories, with its faults."""

    hold: bool = False  # transfers start and do not end
    lose: int = 0  # the number of the next transfers that fail
    progressive: bool = False  # prefill engines offer long prompts before they have read them
    offers: dict[bytes, WireOffer] = field(default_factory=dict)


@dataclass
class WireOffer:
    holder: FakeConnector
    transfer_id: TransferId
    blocks: list[int]
    complete: bool


class FakeConnector(GrowingConnector):
    """A `KVConnector` that copies at the next poll."""

    def __init__(self, wire: Wire, memory: list[list[int]]) -> None:
        self.offers_early = wire.progressive
        self._wire = wire
        self.memory = memory
        self._next_id = 0
        self._events: deque[ConnectorEvent] = deque()
        self._pulls: dict[TransferId, tuple[bytes, int, list[int], float]] = {}
        self.withdrawn = 0

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        return self._offer(block_ids, complete=True)

    def offer_growing(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        return self._offer(block_ids, complete=False)

    def advance(self, transfer_id: TransferId, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        offer = self._wire.offers.get(self._ticket(transfer_id))
        if offer is not None:
            offer.complete = num_ready == len(offer.blocks)

    def _offer(self, block_ids: Sequence[int], *, complete: bool) -> Offer:
        self._next_id += 1
        ticket = self._ticket(self._next_id)
        self._wire.offers[ticket] = WireOffer(self, self._next_id, list(block_ids), complete)
        return Offer(self._next_id, ticket)

    def _ticket(self, transfer_id: TransferId) -> bytes:
        return f"{id(self)}/{transfer_id}".encode()

    def withdraw(self, transfer_id: TransferId) -> None:
        self.end(transfer_id, OfferOutcome.WITHDRAWN)
        self.withdrawn += 1

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        self._next_id += 1
        self._pulls[self._next_id] = (ticket, first_block, list(block_ids), time.monotonic())
        return self._next_id

    def cancel(self, transfer_id: TransferId) -> None:
        if self._pulls.pop(transfer_id, None):
            self._events += [ReceiveFailed(transfer_id, "cancelled"), BlocksReleased(transfer_id)]

    @property
    def is_busy(self) -> bool:
        """Return whether the next poll may bring events."""
        return bool(self._pulls or self._events)

    def poll(self) -> list[ConnectorEvent]:
        if not self._wire.hold:
            for transfer_id, (ticket, *_) in list(self._pulls.items()):
                offer = self._wire.offers.get(ticket)
                if offer is None or offer.complete:
                    self._pull(transfer_id, *self._pulls.pop(transfer_id))
        events = list(self._events)
        self._events.clear()
        return events

    def _pull(
        self, transfer_id: TransferId, ticket: bytes, first_block: int, blocks: list[int], claimed_s: float
    ) -> None:
        if self._wire.lose or ticket not in self._wire.offers:
            self._wire.lose = max(0, self._wire.lose - 1)
            self._events += [ReceiveFailed(transfer_id, "the peer is gone"), BlocksReleased(transfer_id)]
            return
        offer = self._wire.offers[ticket]
        for block, from_block in zip(blocks, offer.blocks[first_block:], strict=True):
            self.memory[block][:] = offer.holder.memory[from_block]
        offer.holder.end(offer.transfer_id, OfferOutcome.FINISHED)
        self._events.append(Received(transfer_id, claimed_s, pulled_s=time.monotonic()))

    def end(self, transfer_id: TransferId, outcome: OfferOutcome) -> None:
        if self._wire.offers.pop(self._ticket(transfer_id), None):
            self._events.append(OfferEnded(transfer_id, outcome))


class FakeEngine:
    """One engine process. `pause` stops it between two steps; `die` acts as `kill -9`."""

    def __init__(
        self,
        record: EngineRecord,
        config: EngineCoreConfig,
        scripts: Scripts,
        wire: Wire,
        grammars: GrammarSource | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.record = record
        self.runner = FakeRunner(config, scripts)
        self.connector = FakeConnector(wire, self.runner.memory)
        drafting = None if drafter is None else Drafting(drafter, MOST_DRAFTS, adapts=False)
        self.core = EngineCore(Scheduler(config, self.connector, grammars=grammars, drafting=drafting), self.runner)
        self.streams: dict[tuple[str, int], FakeStream] = {}
        self.submitted: list[EngineRequest] = []
        self.generations: dict[str, int] = {}  # the newest generation of each request
        self.alive = True
        self.running = asyncio.Event()
        self.running.set()
        self.step_s = 0.0
        self.die_after_tokens: int | None = None
        self.on_death: Callable[[], None] = lambda: None
        self.refuse: EngineError | None = None
        self.transfers: TransferStats | None = None
        self._log = self.core.block_log()
        self._cached = CachedBlocks(config.num_blocks)
        self._cached.apply(self._log.snapshot())
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def _loop(self) -> None:
        while self.alive:
            await self.running.wait()
            try:
                outputs = self.core.step()
            except EngineFailed as failure:
                self._publish(failure.outputs)
                self.die()
                raise
            self._publish(outputs)
            await asyncio.sleep(self.step_s if self.core.has_work() else 0.001)

    def _publish(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            stream = self.streams.get((output.request_id, output.generation))
            if stream is not None:
                stream.queue.put_nowait(output)
                if output.finish_reason is not None:
                    del self.streams[output.request_id, output.generation]
            if self.die_after_tokens is not None:
                self.die_after_tokens -= len(output.token_ids)
                if self.die_after_tokens <= 0:
                    self.die()
                    return

    def die(self) -> None:
        self.alive = False
        self._task.cancel()
        self.on_death()
        for stream in self.streams.values():
            stream.queue.put_nowait(EngineGone(f"{self.record.engine_id} died"))
        self.streams.clear()

    def abort(self, request_id: str, generation: int) -> None:
        """Abort a request's attempts up to this generation; a newer one continues."""
        if self.alive and generation >= self.generations.get(request_id, generation):
            self.core.abort(request_id)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def stats(self) -> EngineStats:
        """Return statistics without step times: a busy machine would make one engine look slower than another."""
        return msgspec.structs.replace(self.core.stats(), step_times=StepTimes())

    @property
    def cached(self) -> CachedBlocks:
        if (changes := self._log.take()) is not None:
            self._cached.apply(changes)
        return self._cached


class FakeStream:
    """See `OutputStream`."""

    def __init__(self, engine: FakeEngine, request: EngineRequest) -> None:
        self.queue: asyncio.Queue[EngineOutput | EngineGone] = asyncio.Queue()
        self._engine = engine
        self._key = (request.request_id, request.generation)
        self._ended = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> EngineOutput:
        if self._ended:
            raise StopAsyncIteration
        item = await self.queue.get()
        if isinstance(item, EngineGone):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    async def aclose(self) -> None:
        """Close the stream as the real one does: an output that nobody took may name an offer unknown to others."""
        if not self._ended:
            self._ended = True
            self._engine.streams.pop(self._key, None)
            self._engine.abort(*self._key)


class FakeCluster:
    """An `EngineClient` with its engines."""

    def __init__(self, scripts: Scripts, grammars: GrammarSource | None = None, **config: object) -> None:
        self.scripts = scripts
        self.grammars = grammars
        self.wire = Wire()
        self.config = config
        self.members: list[FakeEngine] = []
        self.aborts: list[tuple[str, str]] = []
        self.begun: list[tuple[str, str, int]] = []
        self.reach = Reach()
        self.new_drafter: Callable[[], Drafter] | None = None  # for engines that start from now on
        self.client_counters = ClientCounters()
        self.gateways: list[GatewayRecord] = []
        self.fault: Callable[[FakeEngine, EngineRequest], EngineError | None] = lambda engine, request: None

    def start(self, role: Role, *, fingerprint: str = "f", node: str = "node", **config: object) -> FakeEngine:
        rank = len(self.members)
        core = EngineCoreConfig(**{**self.config, **config})
        record = EngineRecord(
            engine_id=f"{role}-{rank}",
            group_id=f"{role}-{rank}",
            epoch=1000 + rank,
            role=role,
            rank=rank,
            node_id=node,
            node_ip="127.0.0.1",
            pid=rank,
            address="",
            kv_address="",
            fingerprint=fingerprint,
            model_id="tiny",
            max_model_len=core.max_model_len,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            num_blocks=core.num_blocks,
        )
        drafter = None if self.new_drafter is None else self.new_drafter()
        self.members.append(FakeEngine(record, core, self.scripts, self.wire, self.grammars, drafter))
        return self.members[-1]

    def engines(self) -> list[EngineView]:
        return [
            EngineView(engine.record, engine.stats, len(engine.streams), engine.transfers, engine.cached)
            for engine in self.members
            if engine.alive and self.reach.includes(engine.record)
        ]

    def counters(self) -> ClientCounters:
        return self.client_counters

    def last_message_s(self, record: EngineRecord) -> float:
        return 0.0

    def listed(self) -> DirectorySnapshot:
        alive = [engine.record for engine in self.members if engine.alive]
        return DirectorySnapshot(len(self.members), alive, self.gateways)

    def submit(self, record: EngineRecord, request: EngineRequest) -> FakeStream:
        engine = self._find(record)
        stream = FakeStream(engine, request)
        if not engine.alive:
            stream.queue.put_nowait(EngineGone(f"{record.engine_id} is gone"))
            return stream
        engine.submitted.append(request)
        error = engine.refuse or self.fault(engine, request)
        if error is not None:
            name, generation = request.request_id, request.generation
            refusal = EngineOutput(
                request_id=name, generation=generation, finish_reason=FinishReason.ERROR, error=error
            )
            stream.queue.put_nowait(refusal)
            return stream
        engine.streams[request.request_id, request.generation] = stream
        engine.generations[request.request_id] = request.generation
        engine.core.add(request)
        return stream

    def begin(self, record: EngineRecord, request_id: str, generation: int, token_id: int) -> None:
        self.begun.append((record.engine_id, request_id, token_id))
        engine = self._find(record)
        if engine.alive:
            engine.core.begin(request_id, generation, token_id)

    def abort(self, record: EngineRecord, request_id: str, generation: int = 0) -> None:
        self.aborts.append((record.engine_id, request_id))
        self._find(record).abort(request_id, generation)

    async def settled(self) -> None:
        """Wait until no living engine has a block in use; fail if that does not happen."""
        async with asyncio.timeout(20):
            while not all(self._is_idle(engine) for engine in self.members if engine.alive):
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        for engine in self.members:
            await engine.close()

    def _find(self, record: EngineRecord) -> FakeEngine:
        return next(engine for engine in self.members if engine.record == record)

    @staticmethod
    def _is_idle(engine: FakeEngine) -> bool:
        stats = engine.stats
        held = stats.num_blocks_held + stats.num_blocks_quarantined
        return stats.num_blocks_free == stats.num_blocks and held == 0 and not engine.streams

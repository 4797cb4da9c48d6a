"""Real `EngineCore`s in this process, on a model that is a function of what it reads from its KV blocks.

The "KV" of position p is a number that stands for all tokens up to p. Every step reads a request's whole context from
its blocks, so a block that was lost, stale or misplaced on its way between engines fails the step that needs it. A
prompt in `scripts` is answered with the script's tokens, any other one with tokens drawn from (KV, seed).
"""

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
from baton.engine.core.engine import EngineCore, EngineCoreConfig, EngineFailed
from baton.engine.core.grammar import GrammarSource
from baton.engine.core.logprobs import Logprobs, TokenLogprobs
from baton.engine.core.messages import (
    EngineError,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
)
from baton.engine.core.pace import StepTimes
from baton.engine.core.scheduling.drafting import Drafting
from baton.engine.core.speculation.drafter import Drafter
from baton.engine.core.step import Chunk, ChunkResult, RowStart, StepPlan, StepResult
from baton.kv_transfer.protocol.stats import TransferStats

Scripts = dict[tuple[int, ...], list[int]]
MOST_DRAFTS = 4  # of a request in a step, where tokens are guessed


def kv_values(tokens: Sequence[int]) -> list[int]:
    values, state = [], 0
    for token in tokens:
        state = hash((state, token))
        values.append(state)
    return values


@dataclass
class Row:
    start: RowStart
    tokens: list[int]
    blocks: list[int]
    num_computed: int


class FakeRunner:
    """A `Runner` that computes each step at once."""

    def __init__(self, config: EngineCoreConfig, scripts: Scripts) -> None:
        self.memory = [[0] * config.block_size for _ in range(config.num_blocks)]
        self.explode = False
        self._config = config
        self._scripts = scripts
        self._rows: dict[int, Row] = {}
        self._masks: dict[tuple[str, int], bytes] = {}  # by request and the tokens before the drawn one

    def launch(self, plan: StepPlan) -> FinishedStep:
        if self.explode:
            raise RuntimeError("the device is gone")
        for row in plan.freed_rows:
            del self._rows[row]
        for start in plan.started_rows:
            tokens = [*start.prompt_token_ids, *start.output_token_ids]
            self._rows[start.row] = Row(start, tokens, list(start.block_tables[0]), start.num_computed)
        for chunk in plan.chunks:
            self._write(self._rows[chunk.row], chunk)
        self._masks = {(self._rows[mask.row].start.request_id, mask.position): mask.words for mask in plan.masks}
        return FinishedStep(StepResult(plan.step, [self._run(self._rows[chunk.row], chunk) for chunk in plan.chunks]))

    def _write(self, row: Row, chunk: Chunk) -> None:
        """Write the chunk's KV. Its drafts are tokens of the row until others are drawn in their place."""
        row.blocks += chunk.new_block_ids[0] if chunk.new_block_ids else []
        start, end = row.num_computed, row.num_computed + chunk.num_tokens
        first_guess = chunk.start + chunk.num_drafts + 1 - len(chunk.drafts)
        row.tokens += [chunk.drafts[position - first_guess] for position in range(end - chunk.num_drafts, end)]
        values, size = kv_values(row.tokens), self._config.block_size
        for position in range(start, end):
            self.memory[row.blocks[position // size]][position % size] = values[position]

    def _run(self, row: Row, chunk: Chunk) -> ChunkResult:
        start, end = row.num_computed, row.num_computed + chunk.num_tokens
        context = [value for block in row.blocks for value in self.memory[block]][:end]
        assert context == kv_values(row.tokens[:end]), f"wrong KV for {row.start.request_id}"
        prompt_logprobs = None
        if chunk.prompt_logprobs:
            targets = range(start + 1, min(end + 1, len(row.start.prompt_token_ids)))
            count = row.start.sampling.prompt_logprobs or 0
            entries = [self._logprobs(context[p - 1], row.tokens[p], count) for p in targets]
            prompt_logprobs = Logprobs.pack(entries) if entries else Logprobs(count + 1)
        row.num_computed = end
        if not chunk.samples:
            return ChunkResult([], None, prompt_logprobs)
        last = end - 1 - chunk.num_drafts  # the position of the last known token
        drawn: list[int] = []
        for position in range(last, end):
            drawn.append(self._draw(row, context[position], position + 1 - len(row.start.prompt_token_ids)))
            if position + 1 == end or row.tokens[position + 1] != drawn[-1]:
                break
        row.tokens[last + 1 :] = drawn
        row.num_computed = len(row.tokens) - 1
        count, logprobs = row.start.sampling.logprobs, None
        if count is not None:
            logprobs = Logprobs.pack([self._logprobs(context[last + i], drawn[i], count) for i in range(len(drawn))])
        return ChunkResult(drawn, logprobs, prompt_logprobs)

    def _draw(self, row: Row, kv: int, done: int) -> int:
        """Draw the token behind `done` tokens of the output."""
        script = self._scripts.get(tuple(row.start.prompt_token_ids))
        if script is not None and done < len(script):
            return script[done]
        position = len(row.start.prompt_token_ids) + done
        if (mask := self._masks.get((row.start.request_id, position))) is not None:
            allowed = [token for token in range(self._config.vocab_size) if mask[token // 8] >> token % 8 & 1]
            return min(allowed, key=lambda token: hash((token, kv, row.start.seed)))
        eos = set(self._config.eos_token_ids)
        return next(
            token for token in map(self._hash_token, range(99), [kv] * 99, [row.start.seed] * 99) if token not in eos
        )

    def _hash_token(self, attempt: int, kv: int, seed: int) -> int:
        return hash((attempt, kv, seed)) % self._config.vocab_size

    def _logprobs(self, kv: int, token: int, count: int) -> TokenLogprobs:
        top = [token, *(self._hash_token(1000 + i, kv, 0) for i in range(count - 1))][:count]
        return TokenLogprobs([token, *top], [-0.25, *(-0.25 - i for i in range(len(top)))], 1)


@dataclass(frozen=True)
class FinishedStep:
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


@dataclass
class Wire:
    """The link between the engines' memories, with its faults."""

    hold: bool = False  # transfers start and do not end
    lose: int = 0  # so many transfers fail
    progressive: bool = False  # long prompts are on offer before they are read
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
        """The next poll may have news."""
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
    """One engine's process. `pause` stops it between two steps, `die` is a kill -9."""

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
        self.core = EngineCore(config, self.runner, self.connector, grammars=grammars, drafting=drafting)
        self.streams: dict[tuple[str, int], FakeStream] = {}
        self.submitted: list[EngineRequest] = []
        self.generations: dict[str, int] = {}  # the newest of each request
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
        """A newer generation lives on."""
        if self.alive and generation >= self.generations.get(request_id, generation):
            self.core.abort(request_id)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def stats(self) -> EngineStats:
        """Tell all but the times of steps: on a busy machine they would say that one engine is slower than others."""
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
        """As the real one: where the last output was not taken, it may tell of KV that nobody else knows of."""
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
        self.new_drafter: Callable[[], Drafter] | None = None  # of engines that start from now on
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
        """Waits until no living engine has a block in use; fails where that does not happen."""
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

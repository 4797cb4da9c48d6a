"""A model that is a pure function of the tokens before it, on a memory that shows every misplaced byte.

The "KV" of position p is a number that stands for all tokens up to p. A chunk writes those of its positions into the
blocks of its row, in every cache group, and then reads what its tokens see in that group, as attention would: a block
that was lost, shared wrongly, overwritten or filled late is an assertion in the very step that would have read it.
Decodes read their old positions before anything is written, too, as kernels may that fetch ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec

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
from baton.engine.core.kv.cache_groups import FIRST_CHECKPOINT_TOKENS
from baton.engine.core.logprobs import Logprobs, TokenLogprobs
from baton.engine.core.messages import EngineOutput, EngineRequest, FinishReason
from baton.engine.core.step import NO_TOKEN, Chunk, ChunkResult, StepPlan, StepResult

from .core_grammars import draw_allowed, made_for

GARBAGE = -1


def kv_of(token_ids: Iterable[int]) -> list[int]:
    """The KV values of a sequence, one for each position."""
    values, state = [], 0
    for token in token_ids:
        state = hash((state, token))  # integers only: the same in every process
        values.append(state)
    return values


def next_token(kv: int, seed: int, vocab_size: int) -> int:
    return hash((kv, seed)) % vocab_size


def logprob_of(kv: int, token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-(hash((kv, token)) % 1000) / 128], 1)


def expected_answer(request: EngineRequest, config: EngineCoreConfig) -> tuple[list[int], FinishReason]:
    """What the request must be answered with, whatever else the engine does: computed without any engine."""
    sampling, tokens = request.sampling, [*request.prompt_token_ids, *request.output_token_ids]
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(config.eos_token_ids))
    drawn: list[int] = []
    kv = kv_of(tokens)[-1]
    while True:
        outputs_before = len(request.output_token_ids) + len(drawn)
        drawn.append(next_token(kv, request.seed, config.vocab_size))
        if sampling.structured_outputs is not None:
            drawn[-1] = draw_allowed(drawn[-1], tokens[len(request.prompt_token_ids) :])
        tokens.append(drawn[-1])
        kv = hash((kv, drawn[-1]))
        if drawn[-1] in stops and outputs_before >= sampling.min_tokens:
            return drawn, FinishReason.STOP
        if outputs_before + 1 == sampling.max_tokens or len(tokens) == config.max_length:
            return drawn, FinishReason.LENGTH
        if request.keep_kv:
            return drawn, FinishReason.HANDOFF


@dataclass
class Row:
    request_id: str
    tokens: list[int]
    num_prompt: int
    tables: list[list[int]]  # of each cache group
    seed: int
    is_constrained: bool
    num_computed: int = 0
    kv: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)  # of the tokens behind the last one
    applied: dict[int, int] = field(default_factory=dict)  # tokens that are in its state, in each group that has some
    drafted: dict[int, int] = field(default_factory=dict)  # by position, the tokens whose inputs are kept beside it

    def __post_init__(self) -> None:
        self.kv = kv_of(self.tokens)

    def replay(self, group: int) -> int:
        """Return how many tokens its state has read, and let it read the drafts that were accepted behind them."""
        before = self.applied.get(group, self.num_computed)
        for position in range(before, self.num_computed):
            assert self.drafted[position] == self.tokens[position], "a draft that was not accepted is replayed"
        return before

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.kv.append(hash((self.kv[-1], token)))

    def cut(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:], self.kv[num_tokens:]


class KVMemory:
    """Blocks of values; what was never written reads as garbage."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [[GARBAGE] * block_size for _ in range(num_blocks)]

    def write(self, table: Sequence[int], position: int, value: int) -> None:
        self.blocks[table[position // self.block_size]][position % self.block_size] = value

    def read(self, table: Sequence[int], num_tokens: int, first: int = 0) -> list[int]:
        """The values of positions `first` to `num_tokens` of a table."""
        skipped = first // self.block_size
        values = [value for block in table[skipped:] for value in self.blocks[block]]
        assert len(values) >= num_tokens - skipped * self.block_size, "the table is too short"
        return values[first - skipped * self.block_size : num_tokens - skipped * self.block_size]


class StateMemory:
    """Slots of states: that behind n tokens is the value of the last of them."""

    def __init__(self, num_slots: int, checkpoint_tokens: int) -> None:
        self.checkpoint_tokens = checkpoint_tokens
        self.slots = [GARBAGE] * num_slots

    def source(self, table: Sequence[int], start: int) -> int | None:
        """The slot that holds the state behind the first `start` tokens."""
        return table[(start - 1) // self.checkpoint_tokens] if start else None

    def between(self, table: Sequence[int], first: int, last: int) -> list[int]:
        """The slots that may hold the state behind `first` to `last` tokens."""
        size = self.checkpoint_tokens
        return [table[entry] for entry in range(max(0, first - 1) // size, (last - 1) // size + 1) if last]

    def written(self, table: Sequence[int], start: int, end: int) -> dict[int, int]:
        """The slots that a chunk writes, and behind how many tokens each."""
        size = self.checkpoint_tokens
        ends = [*range((start // size + 1) * size, end, size), end]
        return {table[(at - 1) // size]: at for at in ends if table[(at - 1) // size] >= 0 or at == end}


class FakeRunner:
    """A `Runner` that checks the contract of `step.py` from the plans alone.

    A lazy one runs a step when its result is asked for, which is as late as a device can be; an eager one at once.
    """

    def __init__(self, config: EngineCoreConfig, *, lazy: bool = True) -> None:
        self.config = config
        self.lazy = lazy
        self.memories = [
            KVMemory(group.num_blocks, config.block_size) for group in config.groups if group.checkpoint_tokens is None
        ]
        self.states = {
            number: StateMemory(group.num_blocks, group.checkpoint_tokens)
            for number, group in enumerate(config.groups)
            if group.checkpoint_tokens is not None
        }
        assert list(self.states) == list(range(len(self.memories), len(config.groups))), "states come last"
        self.memory = self.memories[0]  # the one that transfers and tiers move
        self.rows: dict[int, Row] = {}
        self.in_flight: dict[int, set[tuple[int, int]]] = {}  # groups and blocks that each step may touch
        self._planned: dict[int, list[list[int]]] = {}  # the tables of each row behind all plans
        self._applied: dict[int, int] = {}  # tokens in the states of each row behind all plans, at least
        self.plans: list[StepPlan] = []
        self.fail_at_launch: Exception | None = None
        self.fail_at_result: Exception | None = None
        self.guess_errors = 0.0  # the share of the guesses made in a step that are wrong
        self.draws_nothing = False  # as where a request excludes every token, or the model gives no numbers
        self._queue: deque[FakePendingStep] = deque()

    def launch(self, plan: StepPlan) -> FakePendingStep:
        if self.fail_at_launch is not None:
            raise self.fail_at_launch
        assert plan.step == len(self.plans), "steps are numbered without gaps"
        assert plan.chunks, "an empty step"
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.chunks) <= self.config.max_num_seqs
        kinds = [0 if chunk.num_tokens == 1 else 1 if chunk.num_drafts else 2 for chunk in plan.chunks]
        assert kinds == sorted(kinds), "single tokens come first, then those with drafts"
        assert len({chunk.row for chunk in plan.chunks}) == len(plan.chunks), "one chunk a row"
        plan = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)  # later changes must not reach us
        self.plans.append(plan)
        self.in_flight[plan.step] = set(self._touched(plan))
        pending = FakePendingStep(self, plan)
        self._queue.append(pending)
        if not self.lazy:
            pending.run()
        return pending

    def _touched(self, plan: StepPlan) -> Iterator[tuple[int, int]]:
        """Every block that a chunk of the plan reads or writes."""
        self._planned.update({start.row: [list(table) for table in start.block_tables] for start in plan.started_rows})
        self._applied.update({start.row: start.num_computed for start in plan.started_rows})
        for chunk in plan.chunks:
            append(self._planned[chunk.row], chunk.new_block_ids)
            last = (chunk.start + chunk.num_tokens - 1) // self.config.block_size
            unsettled = [each for step in self.in_flight for each in self.plans[step].chunks if each.row == chunk.row]
            start = chunk.start - sum(each.num_drafts for each in unsettled)
            for group, table in enumerate(self._planned[chunk.row]):
                if (states := self.states.get(group)) is not None:
                    slots = states.between(table, self._applied[chunk.row], chunk.start)
                    if is_decode(chunk):
                        slots += states.between(table, start + 1, chunk.start + 1)
                    else:
                        slots += states.written(table, chunk.start, chunk.start + chunk.num_tokens)
                    yield from ((group, slot) for slot in slots)
                    continue
                first = self._first_seen(group, start) // self.config.block_size
                yield from ((group, block) for block in table[first : last + 1])
            self._applied[chunk.row] = start + (1 if is_decode(chunk) else chunk.num_tokens)

    def _first_seen(self, group: int, position: int) -> int:
        """The first position that the token at this one reads."""
        window = self.config.groups[group].window
        return 0 if window is None else max(0, position - window + 1)

    def run_until(self, pending: FakePendingStep) -> None:
        while self._queue and pending.answer is None:
            self._queue.popleft().run()

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.freed_rows:
            del self.rows[row]
        for start in plan.started_rows:
            assert start.row not in self.rows, "the row is taken"
            assert 0 <= start.row < self.config.max_num_seqs
            tokens = [*start.prompt_token_ids, *start.output_token_ids]
            is_constrained = start.sampling.structured_outputs is not None
            self.rows[start.row] = Row(
                start.request_id,
                tokens,
                len(start.prompt_token_ids),
                start.block_tables,
                start.seed,
                is_constrained,
                start.num_computed,
            )
        for chunk in plan.chunks:
            row = self.rows[chunk.row]
            assert row.num_computed <= chunk.start, "a token is left out"
            if chunk.num_tokens == 1:
                self._check_kv(row, row.num_computed, row.num_computed, "a decode's old KV is of this step")
        for chunk in plan.chunks:
            append(self.rows[chunk.row].tables, chunk.new_block_ids)
        for number, states in self.states.items():
            self._run_states(plan.chunks, number, states)
        for chunk in plan.chunks:
            self._write(chunk)
        self._check_masks(plan)
        results = [self._read_and_draw(chunk) for chunk in plan.chunks]
        for chunk in plan.chunks:
            self._guess(self.rows[chunk.row], plan.num_guesses if chunk.samples else 0)
        return StepResult(plan.step, results)

    def _guess(self, row: Row, count: int) -> None:
        """Keep guesses of what the row draws next, as a drafter on the device does."""
        row.guesses, kv = [], row.kv[-1]
        for position in range(len(row.tokens), len(row.tokens) + count):
            token = next_token(kv, row.seed, self.config.vocab_size)
            is_wrong = Random(f"{row.request_id}/{position}").random() < self.guess_errors
            row.guesses.append((token + is_wrong) % self.config.vocab_size)
            kv = hash((kv, row.guesses[-1]))

    def _check_masks(self, plan: StepPlan) -> None:
        """Each draw of those with a grammar has one, made for exactly the tokens before it, drafts among them."""
        masks = {(mask.row, mask.position): mask.words for mask in plan.masks}
        draws = {
            (chunk.row, len(self.rows[chunk.row].tokens) - behind)
            for chunk in plan.chunks
            if chunk.samples and self.rows[chunk.row].is_constrained
            for behind in range(chunk.num_drafts + 1)
        }
        assert masks.keys() == draws
        for (number, position), words in masks.items():
            row = self.rows[number]
            assert made_for(words) == hash(tuple(row.tokens[row.num_prompt : position])), "a mask of other tokens"

    def _write(self, chunk: Chunk) -> None:
        """Write the chunk's KV. Its drafts are tokens of the row until others are drawn in their place."""
        row = self.rows[chunk.row]
        start, end = row.num_computed, row.num_computed + chunk.num_tokens
        assert chunk.num_tokens > chunk.num_drafts
        assert end - chunk.num_drafts <= len(row.tokens), "tokens that nobody has drawn"
        if chunk.num_drafts:
            assert chunk.samples
            assert end - chunk.num_drafts == len(row.tokens), "drafts of tokens that are drawn already"
        for position in range(end - chunk.num_drafts, end):
            row.append(chunk.drafts[position - chunk.first_guess] if chunk.drafts else row.guesses.pop(0))
            row.drafted[position] = row.tokens[-1]
        for position in range(start, end):
            for memory, table in zip(self.memories, row.tables, strict=False):
                memory.write(table, position, row.kv[position])

    def _run_states(self, chunks: Sequence[Chunk], number: int, states: StateMemory) -> None:
        """Every chunk goes on from the state before it; nobody else writes that slot in the same step."""
        readers: dict[int, set[int]] = {}
        writers: dict[int, tuple[int, int]] = {}
        for chunk in chunks:
            row = self.rows[chunk.row]
            table, start = row.tables[number], row.num_computed
            before = row.replay(number)
            source = states.source(table, before)
            if source is not None:
                assert states.slots[source] == row.kv[before - 1], f"wrong state: {row.request_id}"
                readers.setdefault(source, set()).add(chunk.row)
            if is_decode(chunk):  # behind the token that is known: those that follow are drafts
                written, row.applied[number] = {table[start // states.checkpoint_tokens]: start + 1}, start + 1
            else:
                assert before == start == chunk.start, "drafts before a chunk"
                end = row.applied[number] = start + chunk.num_tokens
                written = states.written(table, start, end)
                assert all(at == end or at - start >= FIRST_CHECKPOINT_TOKENS for at in written.values()), "too early"
            for slot, at in written.items():
                assert slot not in writers, "two chunks write one state"
                writers[slot] = chunk.row, row.kv[at - 1]
        for slot, (writer, value) in writers.items():
            assert readers.get(slot, {writer}) == {writer}, "a state is written that others read"
            states.slots[slot] = value

    def _check_kv(self, row: Row, start: int, end: int, what: str) -> None:
        """What the token at `start` and those behind it read before `end` is there in every group."""
        for group, (memory, table) in enumerate(zip(self.memories, row.tables, strict=False)):
            first = self._first_seen(group, start)
            assert memory.read(table, end, first) == row.kv[first:end], f"{what}: {row.request_id}, group {group}"

    def _read_and_draw(self, chunk: Chunk) -> ChunkResult:
        row, start = self.rows[chunk.row], self.rows[chunk.row].num_computed
        end = start + chunk.num_tokens
        self._check_kv(row, start, end, "wrong KV")
        assert chunk.samples == (end == len(row.tokens))
        prompt = None
        if chunk.prompt_logprobs:
            positions = range(start + 1, min(end + 1, row.num_prompt))
            entries = [logprob_of(row.kv[position - 1], row.tokens[position]) for position in positions]
            prompt = Logprobs.pack(entries) if entries else Logprobs(1)
        if not chunk.samples:
            row.num_computed = end
            return ChunkResult([], None, prompt)
        drawn, last = [], end - 1 - chunk.num_drafts  # the position of the last known token
        for position in range(last, end):
            drawn.append(next_token(row.kv[position], row.seed, self.config.vocab_size))
            if row.is_constrained:
                drawn[-1] = draw_allowed(drawn[-1], row.tokens[row.num_prompt : position + 1])
            if position + 1 == end or row.tokens[position + 1] != drawn[-1]:
                break
        logprobs = Logprobs.pack([logprob_of(row.kv[last + i], token) for i, token in enumerate(drawn)])
        row.cut(last + len(drawn))
        row.append(drawn[-1])
        row.num_computed = len(row.tokens) - 1
        return ChunkResult([NO_TOKEN] if self.draws_nothing else drawn, logprobs, prompt)


def is_decode(chunk: Chunk) -> bool:
    """Whether it has one token that is known, and drafts behind it or none."""
    return chunk.num_tokens == 1 + chunk.num_drafts


class FakePendingStep:
    def __init__(self, runner: FakeRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan
        self.answer: StepResult | None = None

    def run(self) -> None:
        if self.answer is None:
            self.answer = self._runner.execute(self._plan)

    def result(self) -> StepResult:
        if self._runner.fail_at_result is not None:
            raise self._runner.fail_at_result
        self._runner.run_until(self)
        assert self.answer is not None
        self._runner.in_flight.pop(self._plan.step, None)  # an empty step touches nothing
        return self.answer


def append(tables: list[list[int]], new_block_ids: list[list[int]]) -> None:
    """Each group gets its new blocks, where a chunk brings any."""
    if new_block_ids:
        for table, blocks in zip(tables, new_block_ids, strict=True):
            table += blocks


@dataclass
class OpenOffer:
    request_id: str
    generation: int
    blocks: list[int]
    content: list[int]  # of what is written
    num_tokens: int
    num_ready: int = 0  # leading blocks
    withdrawn: bool = False


@dataclass
class Pull:
    request_id: str
    ticket: bytes
    first_block: int
    blocks: list[int]
    cancelled: bool = False
    failed: bool = False


class Arenas:
    """The memories of all cache groups, with blocks numbered from the first arena on to the last."""

    def __init__(self, config: EngineCoreConfig, runner: FakeRunner) -> None:
        self._config = config
        self._memories: list[KVMemory | StateMemory] = [*runner.memories, *runner.states.values()]
        self._firsts = [
            sum(group.num_blocks for group in config.groups[:number]) for number in range(len(config.groups))
        ]

    @property
    def num_groups(self) -> int:
        return len(self._memories)

    def group_of(self, block: int) -> int:
        return max(number for number, first in enumerate(self._firsts) if first <= block)

    def content(self, block: int) -> list[int]:
        """All values of a block, or the state in a slot."""
        return list(self.read(block, self._config.block_size))

    def handed_over(self, num_tokens: int) -> list[tuple[int, int]]:
        """Ranges of positions, one for each block of a hand-off: what a later token reads, as it is computed.

        Of a state the range is its last position.
        """
        found = []
        for number, group in enumerate(self._config.groups):
            if group.checkpoint_tokens is not None:
                found.append((num_tokens, number, num_tokens - 1))
                continue
            size = self._config.block_size
            first = 0 if group.window is None else max(0, num_tokens - group.window + 1)
            starts = range(first // size * size, num_tokens, size)
            found += [(min(start + size, num_tokens), number, start) for start in starts]
        return [(start, end) for end, _, start in sorted(found)]

    def num_complete(self, num_tokens: int, num_computed: int) -> int:
        return sum(end <= num_computed for _, end in self.handed_over(num_tokens))

    def read(self, block: int, num_values: int) -> list[int]:
        memory, own = self._at(block)
        return [memory.slots[own]] if isinstance(memory, StateMemory) else memory.blocks[own][:num_values]

    def write(self, block: int, values: Sequence[int]) -> None:
        memory, own = self._at(block)
        if isinstance(memory, StateMemory):
            (memory.slots[own],) = values
        else:
            memory.blocks[own][: len(values)] = values

    def spoil(self, block: int) -> None:
        memory, own = self._at(block)
        if isinstance(memory, StateMemory):
            memory.slots[own] = GARBAGE
        else:
            memory.blocks[own] = [GARBAGE] * memory.block_size

    def _at(self, block: int) -> tuple[KVMemory | StateMemory, int]:
        number = self.group_of(block)
        return self._memories[number], block - self._firsts[number]


class FakeConnector(GrowingConnector):
    """A `KVConnector` whose transfers move when the test says so, in any order, well or badly.

    `fetch` gives the KV values that a ticket stands for. Between a failure and the release of the blocks, `scribble`
    writes into them as a late transfer would.
    """

    def __init__(
        self, runner: FakeRunner, fetch: Callable[[bytes], Sequence[int]], *, offers_early: bool = False
    ) -> None:
        self.offers_early = offers_early
        self._arenas = Arenas(runner.config, runner)
        self._fetch = fetch
        self._next_id = 0
        self.events: list[ConnectorEvent] = []
        self.offers: dict[TransferId, OpenOffer] = {}
        self.pulls: dict[TransferId, Pull] = {}

    # ---- KVConnector

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        offer = self.offer_growing(request_id, generation, block_ids, num_tokens)
        self.advance(offer.transfer_id, len(block_ids))
        return offer

    def offer_growing(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        transfer_id = self._new_id()
        assert len(block_ids) == len(self._arenas.handed_over(num_tokens)), "exactly the prompt's blocks are offered"
        self.offers[transfer_id] = OpenOffer(request_id, generation, list(block_ids), [], num_tokens)
        return Offer(transfer_id, str(transfer_id).encode())

    def advance(self, transfer_id: TransferId, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        offer = self.offers.get(transfer_id)
        if offer is None:
            return
        assert not offer.withdrawn, "what was given up grows no more"
        if last_blocks:
            assert num_ready == len(offer.blocks), "the last blocks are named before all are written"
            offer.blocks[-len(last_blocks) :] = last_blocks
        content = self._read(offer, num_ready)
        assert GARBAGE not in content, "blocks that were not written are said to be"
        assert content[: len(offer.content)] == offer.content, "what was written before is something else now"
        offer.content, offer.num_ready = content, num_ready

    def withdraw(self, transfer_id: TransferId) -> None:
        if transfer_id in self.offers:
            self.offers[transfer_id].withdrawn = True

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        transfer_id = self._new_id()
        self.pulls[transfer_id] = Pull(request_id, ticket, first_block, list(block_ids))
        return transfer_id

    def cancel(self, transfer_id: TransferId) -> None:
        if transfer_id in self.pulls:
            self.pulls[transfer_id].cancelled = True

    def poll(self) -> list[ConnectorEvent]:
        events, self.events = self.events, []
        return events

    # ---- what the test makes happen

    def end_offer(self, transfer_id: TransferId, outcome: OfferOutcome = OfferOutcome.FINISHED) -> None:
        self.check_offers()
        del self.offers[transfer_id]
        self.events.append(OfferEnded(transfer_id, outcome))

    def complete(self, transfer_id: TransferId) -> None:
        pull = self.pulls.pop(transfer_id)
        assert not pull.cancelled
        assert not pull.failed
        values = list(self._fetch(pull.ticket))
        wanted = self._arenas.handed_over(len(values))[pull.first_block :]
        for block, (start, end) in zip(pull.blocks, wanted, strict=True):  # exactly the missing ones are asked for
            self._arenas.write(block, values[start:end])
        self.events.append(Received(transfer_id))

    def fail(self, transfer_id: TransferId, reason: str = "the peer is gone", *, offer_ended: bool = False) -> None:
        self.pulls[transfer_id].failed = True
        self.events.append(ReceiveFailed(transfer_id, reason, offer_ended))

    def scribble(self, transfer_id: TransferId) -> None:
        for block in self.pulls[transfer_id].blocks:
            self._arenas.spoil(block)

    def release(self, transfer_id: TransferId) -> None:
        assert self.pulls[transfer_id].failed
        del self.pulls[transfer_id]
        self.events.append(BlocksReleased(transfer_id))

    def check_offers(self) -> None:
        """What was promised is still there."""
        for offer in self.offers.values():
            assert self._read(offer, offer.num_ready) == offer.content, "an offered block changed"

    def check_content(self, offer: OpenOffer, token_ids: Sequence[int]) -> None:
        """What was written of an offer is that of these tokens."""
        values = kv_of(token_ids)[: offer.num_tokens]
        places = self._arenas.handed_over(offer.num_tokens)[: offer.num_ready]
        expected = [value for start, end in places for value in values[start:end]]
        assert offer.content == expected, f"{offer.request_id} offers what is not of its prompt"

    def _read(self, offer: OpenOffer, num_blocks: int) -> list[int]:
        """The values of an offer's leading blocks."""
        places = self._arenas.handed_over(offer.num_tokens)
        pairs = zip(offer.blocks[:num_blocks], places[:num_blocks], strict=True)
        return [value for block, (start, end) in pairs for value in self._arenas.read(block, end - start)]

    def _new_id(self) -> TransferId:
        self._next_id += 1
        return self._next_id


def ticket_for(request_tokens: Sequence[int]) -> bytes:
    """A ticket whose KV is known without a peer; see `fetch_from_ticket`."""
    return msgspec.json.encode(list(request_tokens))


def fetch_from_ticket(ticket: bytes) -> list[int]:
    return kv_of(msgspec.json.decode(ticket, type=list[int]))


@dataclass
class Answer:
    """Everything an engine said about one request."""

    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]

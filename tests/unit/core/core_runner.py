"""A runner that computes a model which is a pure function of the tokens before, on `core_memory`.

A chunk writes the KV of its positions into the blocks of its row, in every cache group, and then reads what its tokens
see in that group, as attention would: a block that was lost, shared wrongly, overwritten or filled late is an assertion
in the very step that would have read it. Decodes read their old positions before anything is written, too, as kernels
may that fetch ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from random import Random

import msgspec

from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.kv.cache_groups import FIRST_CHECKPOINT_TOKENS
from baton.engine.core.logprobs import Logprobs
from baton.engine.core.step import NO_TOKEN, Chunk, ChunkResult, StepPlan, StepResult

from .core_grammars import draw_allowed, made_for
from .core_memory import KVMemory, Row, StateMemory, logprob_of, next_token


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
        self.edits_on_host = False  # logits by position, which must be known to the plan
        self._edited_until: dict[int, int] = {}  # length up to which those of a row are
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
        for each in plan.started_rows:
            bound = len(each.prompt_token_ids) + each.sampling.min_tokens if each.stop_token_ids else 0
            self._edited_until[each.row] = bound if each.sampling.is_plain else self.config.max_length
        for chunk in plan.chunks:
            append(self._planned[chunk.row], chunk.new_block_ids)
            longest = max(map(len, self._planned[chunk.row])) * self.config.block_size
            assert longest < self.config.max_model_len + self.config.block_size, "a table that no row has room for"
            last = (chunk.start + chunk.num_tokens - 1) // self.config.block_size
            unsettled = [each for step in self.in_flight for each in self.plans[step].chunks if each.row == chunk.row]
            start = chunk.start - sum(each.num_drafts for each in unsettled)
            if self.edits_on_host and start + 1 < self._edited_until[chunk.row]:
                assert start == chunk.start, "logits are edited at a position that is not known"
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
        for number, chunk in enumerate(plan.chunks):
            can_guess = chunk.samples and number >= (plan.reads_from or 0)  # a draft model has read the tokens before
            self._guess(self.rows[chunk.row], plan.num_guesses if can_guess else 0)
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
        """Check that what the tokens from `start` to `end` read is there in every group."""
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
    """Return whether it has one token that is known, and drafts behind it or none."""
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

"""A `Runner` whose model is a function of what it reads from its KV blocks.

The "KV" of position p is a number that stands for all tokens up to p. Every step reads a request's whole context from
its blocks, so a block that was lost, stale or misplaced on its way between engines fails the step that needs it. A
prompt in `scripts` is answered with the script's tokens, any other one with tokens drawn from (KV, seed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.logprobs import Logprobs, TokenLogprobs
from baton.engine.core.step import Chunk, ChunkResult, RowStart, StepPlan, StepResult

Scripts = dict[tuple[int, ...], list[int]]


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
        self._masks: dict[tuple[str, int], bytes] = {}  # by request and the number of tokens before the drawn one

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
        """Write the chunk's KV. Its drafts count as the row's tokens until other tokens are drawn in their place."""
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

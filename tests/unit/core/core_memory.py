"""Memory on which every misplaced byte shows, and the answers of a model that is a pure function of the tokens before.

The "KV" of position p is a number that stands for all tokens up to p.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.logprobs import TokenLogprobs
from baton.engine.core.messages import EngineRequest, FinishReason

from .core_grammars import draw_allowed

GARBAGE = -1


def kv_of(token_ids: Iterable[int]) -> list[int]:
    """Return the KV values of a sequence, one for each position."""
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
    """Return the right answer to a request, whatever the engine does, computed without an engine."""
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
    tables: list[list[int]]  # for each cache group
    seed: int
    is_constrained: bool
    num_computed: int = 0
    kv: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)  # drafts for the tokens after the last one
    applied: dict[int, int] = field(default_factory=dict)  # tokens that the state has read, by group with states
    drafted: dict[int, int] = field(default_factory=dict)  # by position, tokens with inputs kept beside the state

    def __post_init__(self) -> None:
        self.kv = kv_of(self.tokens)

    def replay(self, group: int) -> int:
        """Apply the accepted drafts to the state, and return how many tokens it has read."""
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
    """Blocks of values; reading an unwritten one gives garbage."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [[GARBAGE] * block_size for _ in range(num_blocks)]

    def write(self, table: Sequence[int], position: int, value: int) -> None:
        self.blocks[table[position // self.block_size]][position % self.block_size] = value

    def read(self, table: Sequence[int], num_tokens: int, first: int = 0) -> list[int]:
        """Return the values of positions `first` to `num_tokens` of a table."""
        skipped = first // self.block_size
        values = [value for block in table[skipped:] for value in self.blocks[block]]
        assert len(values) >= num_tokens - skipped * self.block_size, "the table is too short"
        return values[first - skipped * self.block_size : num_tokens - skipped * self.block_size]


class StateMemory:
    """Slots of states: the state after n tokens is the KV value of the last one."""

    def __init__(self, num_slots: int, checkpoint_tokens: int) -> None:
        self.checkpoint_tokens = checkpoint_tokens
        self.slots = [GARBAGE] * num_slots

    def source(self, table: Sequence[int], start: int) -> int | None:
        """Return the slot that holds the state after the first `start` tokens."""
        return table[(start - 1) // self.checkpoint_tokens] if start else None

    def between(self, table: Sequence[int], first: int, last: int) -> list[int]:
        """Return the slots that may hold the states after `first` to `last` tokens."""
        size = self.checkpoint_tokens
        return [table[entry] for entry in range(max(0, first - 1) // size, (last - 1) // size + 1) if last]

    def written(self, table: Sequence[int], start: int, end: int) -> dict[int, int]:
        """Return the slots that a chunk writes, each with the number of tokens after which its state is."""
        size = self.checkpoint_tokens
        ends = [*range((start // size + 1) * size, end, size), end]
        return {table[(at - 1) // size]: at for at in ends if table[(at - 1) // size] >= 0 or at == end}

"""`SamplingBatch`: the sampling parameters of one step's rows.

A feature that no row of the step uses is `None`, and costs nothing. Features that few rows use are sparse: their
`rows` index the rows of the logits, not those of the runner.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NO_TOKEN = -1  # what a row draws that has none to draw
GREEDY_BELOW = 1e-5  # temperatures so small leave nothing to chance, and dividing by them would overflow


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens before the one that is drawn: row r's are `token_ids[rows[r], :positions[r]]`, prompt first."""

    token_ids: Tensor  # [num_runner_rows, capacity] int32 or int64: the runner's own table, not a copy
    rows: Tensor  # [R] int64: row of the table for each row of the logits
    prompt_lens: Tensor  # [R] int64


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows that may draw only certain tokens. Token t is allowed where bit `t % 32` of word `t // 32` is set."""

    rows: Tensor  # [A] int64
    bits: Tensor  # [A, ceil(V / 32)] int32: the layout that grammar libraries write


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not appear: the last one is banned where the output ends with those before it."""

    rows: Tensor  # [W] int64
    token_ids: Tensor  # [W, L] int64, right-aligned, -1 before the first token


@dataclass(frozen=True, slots=True)
class BannedTokens:
    """Single tokens that cannot be drawn in this step, as stop tokens before `min_tokens`."""

    rows: Tensor  # [N] int64
    token_ids: Tensor  # [N] int64


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values added to the logits of single tokens; no (row, token) comes twice."""

    rows: Tensor  # [N] int64
    token_ids: Tensor  # [N] int64
    values: Tensor  # [N] float32


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition counts over prompt and output, presence and frequency over the output only."""

    rows: Tensor  # [P] int64, each row once
    repetition: Tensor  # [P] float32, 1 is neutral
    presence: Tensor  # [P] float32, 0 is neutral
    frequency: Tensor  # [P] float32, 0 is neutral


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Everything but the logits `[R, V]`, all on their device. `kernels.sampling.sample` explains each field."""

    seeds: Tensor  # [R] int64, not negative
    positions: Tensor  # [R] int64: absolute index of the token that is drawn, i.e. how many tokens precede it
    temperature: Tensor | None = None  # [R] float32, below GREEDY_BELOW is greedy; None: every row is
    top_k: Tensor | None = None  # [R] int64, 0 and -1 keep all
    top_p: Tensor | None = None  # [R] float32, 1 keeps all
    min_p: Tensor | None = None  # [R] float32, 0 keeps all
    allowed: AllowedTokens | None = None
    bad_words: BadWords | None = None
    banned: BannedTokens | None = None
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    history: TokenHistory | None = None  # needed by `penalties` and `bad_words`
    words: Tensor | None = None  # [R, ROW_WORDS] int32: the numbers once more, where a GPU reads them; else made there

    @property
    def edits_logits(self) -> bool:
        """True where some row's logits change before temperature and truncation."""
        edits = (self.allowed, self.bad_words, self.banned, self.bias, self.penalties)
        return any(edit is not None for edit in edits)

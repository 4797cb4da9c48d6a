"""`SamplingBatch`: the sampling parameters of one step's rows.

A feature that no row of the step uses is `None`, and costs nothing. Rarely used features are sparse: their `rows` are
indices of rows of the logits, not of the runner's tables.

A row's numbers are also stored as 32-bit words in a table on the device, from which captured graphs read them:

word     0            1      2      3      4         5          6           7
holds    temperature  top_k  top_p  min_p  seed low  seed high  prompt_len  0
as       float32      int32  float32       uint32               int32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_TOKEN = -1  # the result of a row without any token to draw
GREEDY_BELOW = 1e-5  # lower temperatures are greedy: dividing by them would overflow
ROW_WORDS = 8
TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED_LOW, SEED_HIGH, PROMPT_LEN = range(7)
_WORD = 0xFFFFFFFF
_GREATEST_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens before the drawn one: for row r, `token_ids[rows[r], :positions[r]]`, prompt first."""

    token_ids: Tensor  # [num_runner_rows, capacity] int32 or int64: the runner's own table, not a copy
    rows: Tensor  # [R] int64: row of the table for each row of the logits
    prompt_lens: Tensor  # [R] int64


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows that may draw only certain tokens. Token t is allowed if bit `t % 32` of word `t // 32` is set."""

    rows: Tensor  # [A] int64
    bits: Tensor  # [A, ceil(V / 32)] int32: the layout that grammar libraries write


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not appear. The last token of one is banned if the output ends with the others."""

    rows: Tensor  # [W] int64
    token_ids: Tensor  # [W, L] int64, right-aligned, -1 before the first token


@dataclass(frozen=True, slots=True)
class BannedTokens:
    """Single tokens that cannot be drawn in this step, such as stop tokens before `min_tokens`."""

    rows: Tensor  # [N] int64
    token_ids: Tensor  # [N] int64


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values that are added to logits of single tokens. Each (row, token) occurs at most once."""

    rows: Tensor  # [N] int64
    token_ids: Tensor  # [N] int64
    values: Tensor  # [N] float32


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties: repetition considers prompt and output, presence and frequency only the output."""

    rows: Tensor  # [P] int64, each row once
    repetition: Tensor  # [P] float32, 1 is neutral
    presence: Tensor  # [P] float32, 0 is neutral
    frequency: Tensor  # [P] float32, 0 is neutral


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """All inputs of `kernels.sampling.sample` but the logits [R, V], on the logits' device."""

    seeds: Tensor  # [R] int64, not negative
    positions: Tensor  # [R] int64: absolute index of the drawn token, i.e. the number of tokens before it
    temperature: Tensor | None = None  # [R] float32, below GREEDY_BELOW is greedy; None: all rows are greedy
    top_k: Tensor | None = None  # [R] int64, 0 and -1 keep all
    top_p: Tensor | None = None  # [R] float32, 1 keeps all
    min_p: Tensor | None = None  # [R] float32, 0 keeps all
    allowed: AllowedTokens | None = None
    bad_words: BadWords | None = None
    banned: BannedTokens | None = None
    bias: LogitBias | None = None
    penalties: Penalties | None = None
    history: TokenHistory | None = None  # needed by `penalties` and `bad_words`
    words: Tensor | None = None  # [R, ROW_WORDS] int32: the numbers as GPU kernels read them; None: encoded when needed

    @property
    def edits_logits(self) -> bool:
        """True if some row's logits are edited before temperature and truncation."""
        edits = (self.allowed, self.bad_words, self.banned, self.bias, self.penalties)
        return any(edit is not None for edit in edits)


class PlainRequest(Protocol):
    """The parameters that every draw needs."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


def encode_row(request: PlainRequest, *, seed: int, prompt_len: int) -> NDArray[np.int32]:
    """Return the `ROW_WORDS` words of a request with a prompt of `prompt_len` tokens; `seed` is in [0, 2**63)."""
    words = np.zeros(ROW_WORDS, dtype=np.int32)
    floats = words.view(np.float32)
    floats[TEMPERATURE], floats[TOP_P], floats[MIN_P] = request.temperature, request.top_p, request.min_p
    words[TOP_K], words[PROMPT_LEN] = min(request.top_k, _GREATEST_TOP_K), prompt_len
    words.view(np.uint32)[[SEED_LOW, SEED_HIGH]] = seed & _WORD, seed >> 32
    return words


def encode_batch(batch: SamplingBatch) -> Tensor:
    """Return the words [R, ROW_WORDS] int32 of a batch's numbers, on their device, without synchronizing with it."""
    words = batch.seeds.new_zeros(len(batch.seeds), ROW_WORDS, dtype=torch.int32)
    floats = words.view(torch.float32)
    floats[:, TOP_P] = 1.0 if batch.top_p is None else batch.top_p
    for column, numbers in ((TEMPERATURE, batch.temperature), (MIN_P, batch.min_p)):
        if numbers is not None:
            floats[:, column] = numbers
    if batch.top_k is not None:
        words[:, TOP_K] = batch.top_k.clamp(max=_GREATEST_TOP_K)
    words[:, SEED_LOW], words[:, SEED_HIGH] = batch.seeds, batch.seeds >> 32  # the copy keeps the low bits
    return words


def decode_rows(table: Tensor, rows: Tensor, positions: Tensor) -> SamplingBatch:
    """Return the batch for `rows` [R] of a `table` [num_rows, ROW_WORDS] int32. A padding row, -1, reads row 0."""
    words = table[rows.clamp(min=0).long()]
    floats = words.view(torch.float32)
    return SamplingBatch(
        seeds=words[:, SEED_LOW : SEED_HIGH + 1].contiguous().view(torch.int64)[:, 0],
        positions=positions.long(),
        temperature=floats[:, TEMPERATURE].contiguous(),
        top_k=words[:, TOP_K].long(),
        top_p=floats[:, TOP_P].contiguous(),
        min_p=floats[:, MIN_P].contiguous(),
    )

"""Builds a step's `SamplingBatch` from the sampling state of the runner's rows, written when a request gets its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .batch import (
    GREEDY_BELOW,
    AllowedTokens,
    BadWords,
    BannedTokens,
    LogitBias,
    Penalties,
    PlainRequest,
    SamplingBatch,
    TokenHistory,
    encode_batch,
)

T = TypeVar("T")
_ALIGNMENT = 16  # bytes: the alignment of tensors that Triton and vector loads may assume


class SamplingRequest(PlainRequest, Protocol):
    """The sampling parameters of a request; `baton.engine.SamplingParams` is one."""

    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...
    @property
    def allowed_token_ids(self) -> Sequence[int] | None: ...
    @property
    def bad_words_token_ids(self) -> Sequence[Sequence[int]]: ...


@dataclass(frozen=True, slots=True)
class _StopGate:
    """Stop tokens that cannot be drawn before position `opens_at`."""

    opens_at: int
    token_ids: Tensor  # [S] int64


@dataclass(frozen=True, slots=True)
class _Changing:
    """The parts of a batch that are new in every step."""

    positions: Tensor
    banned: BannedTokens | None
    allowed: AllowedTokens | None


class SamplingRows:
    """The sampling state of the runner's rows, from which it builds one `SamplingBatch` per step.

        start(row, request, ...) -> batch(rows, positions), step after step -> free(row)

    Each numeric parameter is one tensor, indexed by row. Rarely used features are dictionaries by row, so that a step
    costs nothing for rows without them. If a step has the same rows as the previous one, gathered tensors are reused.
    """

    def __init__(self, num_rows: int, vocab_size: int, token_ids: Tensor) -> None:
        """`token_ids` `[num_rows, capacity]` int32 or int64 is the runner's table of tokens, read in place."""
        self._vocab_size = vocab_size
        self._token_ids = token_ids
        self._device = token_ids.device
        self._numbers = {
            "temperature": torch.zeros(num_rows),
            "top_k": torch.zeros(num_rows, dtype=torch.int64),
            "top_p": torch.ones(num_rows),
            "min_p": torch.zeros(num_rows),
            "repetition_penalty": torch.ones(num_rows),
            "presence_penalty": torch.zeros(num_rows),
            "frequency_penalty": torch.zeros(num_rows),
            "seed": torch.zeros(num_rows, dtype=torch.int64),
            "prompt_len": torch.zeros(num_rows, dtype=torch.int64),
        }
        # the same memory as numpy arrays: setting a number through torch takes microseconds
        self._cells = {name: numbers.numpy() for name, numbers in self._numbers.items()}
        self._random: set[int] = set()
        self._truncated: dict[str, set[int]] = {"top_k": set(), "top_p": set(), "min_p": set()}
        self._penalized: set[int] = set()
        self._allowed: dict[int, Tensor] = {}  # [ceil(V / 32)] int32
        self._bad_words: dict[int, list[list[int]]] = {}
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}  # token ids [B] int64, values [B] float32
        self._gates: dict[int, _StopGate] = {}
        self._edited: set[int] = set()  # rows whose logits change in every step
        self._masks: dict[tuple[int, int], Tensor] = {}  # by row and position: [ceil(V / 32)] int32, for one step only
        self._gathered: tuple[list[int], SamplingBatch] | None = None

    def start(
        self, row: int, request: SamplingRequest, *, seed: int, prompt_len: int, stop_token_ids: Sequence[int]
    ) -> None:
        """Assign a request to the free row `row`. `stop_token_ids` are banned until `request.min_tokens` outputs exist.

        The row's first `prompt_len` tokens are the prompt. For penalties and `min_tokens`, later ones are output.
        """
        cells = self._cells
        for name in ("temperature", "top_k", "top_p", "min_p"):
            cells[name][row] = getattr(request, name)
        cells["seed"][row], cells["prompt_len"][row] = seed, prompt_len
        if request.temperature >= GREEDY_BELOW:
            self._random.add(row)
            self._note_truncation(row, request)
        penalties = (request.repetition_penalty, request.presence_penalty, request.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            self._penalized.add(row)
            for name, value in zip(("repetition", "presence", "frequency"), penalties, strict=True):
                cells[f"{name}_penalty"][row] = value
        if request.allowed_token_ids is not None:
            self._allowed[row] = self._pack(request.allowed_token_ids)
        if request.bad_words_token_ids:
            self._bad_words[row] = [list(word) for word in request.bad_words_token_ids]
        if request.logit_bias:
            self._bias[row] = (torch.tensor(list(request.logit_bias)), torch.tensor(list(request.logit_bias.values())))
        if request.min_tokens > 0 and stop_token_ids:
            stops = torch.tensor(list(dict.fromkeys(stop_token_ids)))
            self._gates[row] = _StopGate(prompt_len + request.min_tokens, stops)
        if any(row in state for state in (self._penalized, self._allowed, self._bad_words, self._bias)):
            self._edited.add(row)
        self._gathered = None

    def free(self, row: int) -> None:
        """Free `row`. Freeing a free row has no effect."""
        for rows in (self._random, self._penalized, self._edited, *self._truncated.values()):
            rows.discard(row)
        for state in (self._allowed, self._bad_words, self._bias, self._gates):
            state.pop(row, None)
        self._gathered = None

    def mask(self, masks: dict[tuple[int, int], Tensor]) -> None:
        """Set the next step's masks (`AllowedTokens.bits` on the CPU), in addition to the requests' own restrictions.

        They are keyed by row and position (the number of tokens before the drawn one), so that a row that draws several
        tokens has a mask for each. They replace the previous step's masks.
        """
        self._masks = masks

    def edited(self, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Return the indices i for which `rows[i]` at `positions[i]` needs more than the words of `encode_row`.

        These have penalties, a bias, allowed tokens, a mask, bad words, or stop tokens that are still banned.
        """
        if not self._edited and not self._gates and not self._masks:
            return []
        return [
            index
            for index, (row, position) in enumerate(zip(rows, positions, strict=True))
            if row in self._edited or (row, position) in self._masks or self._shut(row, position) is not None
        ]

    def batch(self, rows: Sequence[int], positions: Sequence[int]) -> SamplingBatch:
        """Build the batch for logits whose row i belongs to `rows[i]`; `positions[i]` tokens precede the drawn one."""
        rows = list(rows)
        if self._gathered is None or self._gathered[0] != rows:
            self._gathered = (rows, self._gather(rows))
        banned = self._banned(rows, positions) if self._gates else None
        masked = self._gather_allowed(rows, positions) if self._masks else None
        changing = upload(_Changing(torch.tensor(positions), banned, masked), self._device)
        batch = replace(self._gathered[1], positions=changing.positions, banned=changing.banned)
        return batch if masked is None else replace(batch, allowed=changing.allowed)

    def _note_truncation(self, row: int, request: SamplingRequest) -> None:
        if 0 < request.top_k < self._vocab_size:
            self._truncated["top_k"].add(row)
        if request.top_p < 1:
            self._truncated["top_p"].add(row)
        if request.min_p > 0:
            self._truncated["min_p"].add(row)

    def _gather(self, rows: list[int]) -> SamplingBatch:
        index = torch.tensor(rows)

        def numbers(name: str) -> Tensor:
            return self._numbers[name][index]

        def truncation(name: str) -> Tensor | None:
            users = self._truncated[name]
            return None if not users or users.isdisjoint(rows) else numbers(name)

        penalties = self._gather_penalties(rows)
        bad_words = self._gather_bad_words(rows)
        reads_history = penalties is not None or (bad_words is not None and bad_words.token_ids.shape[1] > 1)
        batch = SamplingBatch(
            seeds=numbers("seed"),
            positions=index,
            temperature=None if self._random.isdisjoint(rows) else numbers("temperature"),
            top_k=truncation("top_k"),
            top_p=truncation("top_p"),
            min_p=truncation("min_p"),
            allowed=self._gather_allowed(rows) if self._allowed else None,
            bad_words=bad_words,
            bias=self._gather_bias(rows),
            penalties=penalties,
            history=TokenHistory(self._token_ids, index, numbers("prompt_len")) if reads_history else None,
        )
        if self._device.type == "cpu":
            return batch
        return upload(replace(batch, words=encode_batch(batch)), self._device)

    def _gather_penalties(self, rows: list[int]) -> Penalties | None:
        users = [i for i, row in enumerate(rows) if row in self._penalized] if self._penalized else []
        if not users:
            return None
        index = torch.tensor([rows[i] for i in users])
        repetition, presence, frequency = (
            self._numbers[f"{name}_penalty"][index] for name in ("repetition", "presence", "frequency")
        )
        return Penalties(torch.tensor(users), repetition, presence, frequency)

    def _gather_allowed(self, rows: list[int], positions: Sequence[int] | None = None) -> AllowedTokens | None:
        """Gather the allowed tokens of the requests and, with `positions`, also the step's masks."""
        masks = [None] * len(rows) if positions is None else map(self._masks.get, zip(rows, positions, strict=True))
        users, bits = [], []
        for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
            if (words := _both(self._allowed.get(row), mask)) is not None:
                users.append(i)
                bits.append(words)
        return AllowedTokens(torch.tensor(users), torch.stack(bits)) if users else None

    def _gather_bad_words(self, rows: list[int]) -> BadWords | None:
        words = [(i, word) for i, row in enumerate(rows) for word in self._bad_words.get(row, ())]
        if not words:
            return None
        longest = max(len(word) for _, word in words)
        padded = torch.tensor([[-1] * (longest - len(word)) + word for _, word in words])
        return BadWords(torch.tensor([i for i, _ in words]), padded)

    def _gather_bias(self, rows: list[int]) -> LogitBias | None:
        users = [(i, self._bias[row]) for i, row in enumerate(rows) if row in self._bias] if self._bias else []
        if not users:
            return None
        return LogitBias(
            rows=torch.cat([torch.full_like(tokens, i) for i, (tokens, _) in users]),
            token_ids=torch.cat([tokens for _, (tokens, _) in users]),
            values=torch.cat([values for _, (_, values) in users]),
        )

    def _banned(self, rows: list[int], positions: Sequence[int]) -> BannedTokens | None:
        shut = []
        for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
            stops = self._shut(row, position)
            if stops is not None:
                shut.append((i, stops))
        if not shut:
            return None
        return BannedTokens(
            rows=torch.cat([torch.full_like(tokens, i) for i, tokens in shut]),
            token_ids=torch.cat([tokens for _, tokens in shut]),
        )

    def _shut(self, row: int, position: int) -> Tensor | None:
        """Return the stop tokens that `row` cannot draw at `position`."""
        gate = self._gates.get(row)
        return gate.token_ids if gate is not None and position < gate.opens_at else None

    def _pack(self, token_ids: Sequence[int]) -> Tensor:
        """Pack token ids to one bit per token. Takes time for the given ids only, not for a vocabulary of 150 000."""
        tokens = torch.tensor(list(token_ids), dtype=torch.int64).unique()
        words = torch.zeros(-(-self._vocab_size // 32), dtype=torch.int64)
        words.index_add_(0, tokens >> 5, 1 << (tokens & 31))
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _both(asked: Tensor | None, mask: Tensor | None) -> Tensor | None:
    if asked is None or mask is None:
        return mask if asked is None else asked
    return asked & mask


def upload(record: T, device: torch.device) -> T:
    """Copy all host tensors of `record`, also in nested dataclasses, to `device` in one copy, without waiting.

    They are packed into one pinned buffer, which torch reuses when the copy has finished. Tensors that are already on a
    device are unchanged, and so is everything if `device` is a CPU.
    """
    if device.type == "cpu":
        return record
    found: list[Tensor] = []
    _collect(record, found)
    ends = [0]
    for tensor in found:
        ends.append(ends[-1] + -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT)
    pinned = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, start in zip(found, ends, strict=False):
        _view(pinned, start, tensor).copy_(tensor)
    copied = pinned.to(device, non_blocking=True)
    views = iter([_view(copied, start, tensor) for tensor, start in zip(found, ends, strict=False)])
    return _rebuilt(record, views)


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a view of `buffer` from byte `start` on, with the dtype and shape of `like`."""
    return buffer[start : start + like.numel() * like.itemsize].view(like.dtype).view(like.shape)


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.device.type == "cpu":
            found.append(value)
    elif is_dataclass(value):
        for field in fields(value):
            _collect(getattr(value, field.name), found)


def _rebuilt(value: Any, views: Any) -> Any:
    """Return `value` with its host tensors, in the order of `_collect`, replaced by `views`."""
    if isinstance(value, Tensor):
        return next(views) if value.device.type == "cpu" else value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: _rebuilt(part, views) for name, part in parts.items()})
    return value

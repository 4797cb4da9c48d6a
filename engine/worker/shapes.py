"""Sizes of steps: which are captured, and which captured size serves a step.

A captured step has fixed numbers of sequences and tokens. A smaller step is padded to the next size.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from baton.kernels.attention import SHORT_CONTEXTS

from ..core.speculation.config import MAX_DRAFTED_TOKENS
from ..core.step import StepSize

# Numbers of decodes for which torch's matrix products take longer than for the next larger number.
_SLOW_DECODES = frozenset({192, 224, 240})
# Between 128 and 256 tokens, only the size that suits matrix products best.
_CHUNK_TOKENS = (16, 32, 64, 128, 208, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_CHUNK_SEQS = (1, 8, 64, 256)  # with 1, because a single prompt is the most frequent mix in a lightly loaded engine
_DRAFTED_CHUNK_SEQS = (8, 64)  # of mixes with drafts, beside the largest possible number
_CPU_CHUNK_TOKENS = (64, 128, 256, 512)


@dataclass(frozen=True)
class StepLimits:
    """Bounds of every step of a runner."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_drafts: int = 0  # of one request in a step
    guesses_on_device: bool = False  # the model's draft head, or a draft model, makes the guesses

    @property
    def max_num_draws(self) -> int:
        """The most tokens that a step can draw, where a chunk without draws counts as one."""
        return max(self.max_num_seqs, min(self.max_num_seqs * (1 + self.max_drafts), MAX_DRAFTED_TOKENS))

    @property
    def max_guesses_on_device(self) -> int:
        """The most guesses for a request that are made on the device in a step."""
        return self.max_drafts if self.guesses_on_device else 0

    @property
    def max_guesses(self) -> int:
        """The guesses that a row keeps: for its drafts, and for the tokens that the step before may draw."""
        return 2 * (1 + self.max_drafts) if self.max_drafts else 0


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The size of a step, and bounds of its sequences."""

    num_seqs: int
    num_tokens: int
    num_decodes: int  # leading sequences of one token each, which the decode kernels serve
    max_query_len: int
    max_seq_len: int
    num_kv_tokens: int | None = None  # of all sequences behind the decodes; None: any number (captured steps)
    num_wanted: int | None = None  # tokens that go through the whole last layer; None: all of them
    max_drafts: int = 0  # of one sequence
    num_draws: int | None = None  # with drafts: the number of draws, at least one for each sequence

    @classmethod
    def of_decodes(cls, num_seqs: int, max_seq_len: int) -> StepShape:
        """Return the shape of a step of one token for each sequence."""
        return cls(
            num_seqs=num_seqs, num_tokens=num_seqs, num_decodes=num_seqs, max_query_len=1, max_seq_len=max_seq_len
        )

    @property
    def is_decode(self) -> bool:
        return self.num_decodes == self.num_tokens

    @property
    def is_drafted(self) -> bool:
        """True for a step of decodes with drafts, in which no prompt is read."""
        return self.max_drafts > 0 and self.num_draws == self.num_tokens

    @property
    def wanted_rows(self) -> int:
        """The number of tokens that go through the whole last layer."""
        return self.num_tokens if self.num_wanted is None else self.num_wanted


class DraftedSize(NamedTuple):
    """The size of a captured step of decodes with drafts."""

    num_seqs: int
    num_tokens: int
    longest: int  # the most tokens of one sequence


class DraftedMix(NamedTuple):
    """The size of a captured step of chunks of any length, some of them decodes with drafts."""

    num_tokens: int
    num_draws: int
    num_seqs: int


class Shapes(Protocol):
    """The captured sizes of one kind of device."""

    @property
    def padding(self) -> StepShape:
        """One padding sequence of one padding token: the step of a rank that has nothing to do."""
        ...

    def in_capture_order(self) -> Iterator[StepShape]:
        """Yield every captured size once."""
        ...

    def fitting(self, sizes: Sequence[StepSize], *, alone: int) -> StepShape | None:
        """Return the smallest size that serves steps of all these sizes; None if there is none.

        `alone`: the length of this rank's sequence, if it has only one, else 0. It must not affect anything on which
        the ranks of a group have to agree.
        """
        ...

    def num_wanted(self, size: StepSize) -> int:
        """Return how many tokens go through the whole last layer in a step of this size that is not captured."""
        ...


class CudaShapes:
    """Decodes of one token each, decodes with drafts, and mixes of chunks of any length, with or without drafts.

    In a captured mix the chunk kernels serve every sequence, also single tokens, so the number of decodes is not part
    of its size. The last token of every sequence is wanted, whether or not the sequence samples; with drafts, so is
    the token before each draft.
    """

    def __init__(self, limits: StepLimits, *, max_tokens: int) -> None:
        """Mixes are captured up to `max_tokens` tokens in a step."""
        self._max_model_len = limits.max_model_len
        self._decodes = decode_sizes(limits.max_num_seqs)
        self._contexts = [context for context in SHORT_CONTEXTS if context < limits.max_model_len]
        largest = min(max_tokens, limits.max_num_batched_tokens)
        self._tokens = [size for size in _CHUNK_TOKENS if size < largest] + [largest] * (largest > 0)
        self._seqs = [size for size in _CHUNK_SEQS if size < limits.max_num_seqs] + [limits.max_num_seqs]
        self._max_drafts = limits.max_drafts
        self._drafted = drafted_sizes(self._decodes, limits)
        self._drafted_mixes = drafted_mixes(self._tokens, limits)

    @property
    def padding(self) -> StepShape:
        return self._decode(1)

    def in_capture_order(self) -> Iterator[StepShape]:
        """Yield mixes, then decodes, the largest first, because all share one pool of memory."""
        plain = {(min(seqs, tokens), tokens) for tokens in self._tokens for seqs in self._seqs}
        mixes = [self._mix(*size) for size in plain] + [self._mix_with_drafts(size) for size in self._drafted_mixes]
        yield from sorted(mixes, key=lambda mix: (mix.num_tokens, mix.wanted_rows, mix.num_seqs), reverse=True)
        for drafted in reversed(self._drafted):
            yield self._with_drafts(drafted)
        for size in reversed(self._decodes):
            yield self._decode(size)
        for context in self._contexts:
            for drafted in self._drafted:
                if drafted.num_seqs == 1:
                    yield self._with_drafts(drafted, context)
            yield self._one_decode(context)

    def fitting(self, sizes: Sequence[StepSize], *, alone: int) -> StepShape | None:
        if any(size.all_hidden for size in sizes):
            return None
        num_seqs, num_tokens = max(size.num_seqs for size in sizes), max(size.num_tokens for size in sizes)
        if all(size.num_seqs == size.num_tokens for size in sizes):
            return self.decode(num_seqs, alone)
        max_drafts = max(size.max_drafts for size in sizes)
        if all(size.only_decodes for size in sizes):
            return self.drafted(num_seqs, num_tokens, alone=alone, longest=1 + max_drafts)
        if max_drafts:
            return self.drafted_chunks(num_seqs, num_tokens, max(size.num_draws for size in sizes))
        return self.chunks(num_seqs, num_tokens)

    def num_wanted(self, size: StepSize) -> int:
        return size.num_tokens if size.all_hidden else size.num_draws

    def decode(self, num_seqs: int, alone: int) -> StepShape | None:
        """Return the size for one token of each of `num_seqs` sequences. `alone`: see `fitting`."""
        size = at_least(self._decodes, num_seqs)
        if size is None:
            return None
        context = at_least(self._contexts, alone) if size == 1 else None
        return self._decode(size) if context is None else self._one_decode(context)

    def drafted(self, num_seqs: int, num_tokens: int, *, alone: int, longest: int) -> StepShape | None:
        """Return the size for decodes with drafts; None if no captured size is large enough. `alone`: see `fitting`."""
        wanted = (num_seqs, num_tokens, longest)
        size = next((size for size in self._drafted if all(map(operator.ge, size, wanted))), None)
        if size is None:
            return None
        context = at_least(self._contexts, alone) if size.num_seqs == 1 else None
        return self._with_drafts(size, context)

    def chunks(self, num_seqs: int, num_tokens: int) -> StepShape | None:
        """Return the size for any chunks; None if no captured size is large enough."""
        tokens, seqs = at_least(self._tokens, num_tokens), at_least(self._seqs, num_seqs)
        return None if tokens is None or seqs is None else self._mix(min(seqs, tokens), tokens)

    def drafted_chunks(self, num_seqs: int, num_tokens: int, num_draws: int) -> StepShape | None:
        """Return the size for any chunks beside decodes with drafts; None if no captured size is large enough."""
        wanted = DraftedMix(num_tokens, num_draws, num_seqs)
        size = next((size for size in self._drafted_mixes if all(map(operator.ge, size, wanted))), None)
        return None if size is None else self._mix_with_drafts(size)

    def _one_decode(self, context: int) -> StepShape:
        """Return the size for one short sequence. This is frequent, and has its own attention kernel."""
        return StepShape.of_decodes(1, context)

    def _decode(self, num_seqs: int) -> StepShape:
        return StepShape.of_decodes(num_seqs, self._max_model_len)

    def _with_drafts(self, size: DraftedSize, context: int | None = None) -> StepShape:
        """Return the size for drafted sequences. For a single short one, `context` is the most tokens it may have."""
        return StepShape(
            num_seqs=size.num_seqs,
            num_tokens=size.num_tokens,
            num_decodes=0,
            max_query_len=size.longest,
            max_seq_len=context or self._max_model_len,
            max_drafts=self._max_drafts,
            num_draws=size.num_tokens,
        )

    def _mix_with_drafts(self, size: DraftedMix) -> StepShape:
        mix, num_draws = self._mix(size.num_seqs, size.num_tokens), size.num_draws
        return replace(mix, num_wanted=num_draws, max_drafts=self._max_drafts, num_draws=num_draws)

    def _mix(self, num_seqs: int, num_tokens: int) -> StepShape:
        return StepShape(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_decodes=0,
            max_query_len=min(num_tokens, self._max_model_len),
            max_seq_len=self._max_model_len,
            num_wanted=num_seqs,
        )


class CpuShapes:
    """Decodes of one token each, decodes with drafts, and mixes of chunks of up to 512 tokens.

    With more tokens, the native calls take so long that the Python between them does not matter. Only tokens that are
    sampled from or scored are wanted; in a step of decodes with drafts, all are.
    """

    def __init__(self, limits: StepLimits) -> None:
        self._max_num_seqs = limits.max_num_seqs
        self._max_model_len = limits.max_model_len
        self._decodes = decode_sizes(limits.max_num_seqs)
        largest = min(limits.max_num_batched_tokens, _CPU_CHUNK_TOKENS[-1])
        self._tokens = [size for size in _CPU_CHUNK_TOKENS if size < largest] + [largest] * (largest > 1)
        drafted = min(largest, limits.max_num_draws) if limits.max_drafts else 0
        self._drafted = decode_sizes(drafted)[1:] if drafted > 1 else []

    @property
    def padding(self) -> StepShape:
        return self._decode(1)

    def in_capture_order(self) -> Iterator[StepShape]:
        """Yield decodes, then mixes, the smallest first, as a model may be recordable only up to some size."""
        yield from map(self._decode, self._decodes)
        yield from map(self._with_drafts, self._drafted)
        yield from map(self._mix, self._tokens)

    def fitting(self, sizes: Sequence[StepSize], *, alone: int) -> StepShape | None:
        if len(sizes) > 1:
            return None  # ranks that wait for each other within a step do not capture
        (size,) = sizes
        if size.num_wanted == size.num_tokens:
            if size.num_seqs == size.num_tokens:
                decodes = at_least(self._decodes, size.num_seqs)
                return None if decodes is None else self._decode(decodes)
            drafted = at_least(self._drafted, size.num_tokens)
            return None if drafted is None else self._with_drafts(drafted)
        tokens = at_least(self._tokens, size.num_tokens)
        shape = None if tokens is None else self._mix(tokens)
        return shape if shape is not None and size.num_wanted <= (shape.num_wanted or 0) else None

    def num_wanted(self, size: StepSize) -> int:
        return size.num_wanted

    def _decode(self, num_seqs: int) -> StepShape:
        return StepShape.of_decodes(num_seqs, self._max_model_len)

    def _with_drafts(self, num_tokens: int) -> StepShape:
        return self._chunks(min(self._max_num_seqs, num_tokens), num_tokens, num_wanted=None)

    def _mix(self, num_tokens: int) -> StepShape:
        # Fewer wanted tokens than tokens: a recorded call tells the two numbers apart by their values.
        return self._chunks(self._max_num_seqs, num_tokens, num_wanted=min(self._max_num_seqs, num_tokens - 1))

    def _chunks(self, num_seqs: int, num_tokens: int, num_wanted: int | None) -> StepShape:
        return StepShape(
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            num_decodes=0,
            max_query_len=num_tokens,
            max_seq_len=self._max_model_len,
            num_wanted=num_wanted,
        )


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of decodes that are captured, ascending to `max_num_seqs`: by 8, then by 16, then by 32."""
    sizes, size = [], 1
    while size < max_num_seqs:
        if size not in _SLOW_DECODES:
            sizes.append(size)
        size += size if size < 8 else 8 if size < 64 else 16 if size < 256 else 32
    return [*sizes, max_num_seqs]


def drafted_sizes(decodes: Sequence[int], limits: StepLimits) -> list[DraftedSize]:
    """Return the captured sizes of decodes with drafts, ascending.

    Each sequence has at most 2 or 4 tokens, for which attention treats it like a decode; or as many as it may have,
    with an average of at most 4 or with no such limit.
    """
    most = 1 + limits.max_drafts
    each = {(count, count) for count in (2, 4, most) if count <= most} | {(4, most) for _ in range(most > 4)}
    sizes = {
        DraftedSize(seqs, min(seqs * average, limits.max_num_draws), longest)
        for seqs in decodes
        for average, longest in each
    }
    return sorted(size for size in sizes if size.num_tokens > size.num_seqs and size.longest > 1)


def drafted_mixes(tokens: Sequence[int], limits: StepLimits) -> list[DraftedMix]:
    """Return the captured sizes of mixes with drafts, with these numbers of tokens, ascending.

    Every sequence may have the most drafts that a request gets. At least one token is neither a draft nor the token
    before a draft; otherwise no prompt is read.
    """
    if not limits.max_drafts:
        return []
    seqs = [count for count in _DRAFTED_CHUNK_SEQS if count < limits.max_num_seqs] + [limits.max_num_seqs]
    sizes = {
        DraftedMix(size, min(size - 1, count * (1 + limits.max_drafts), limits.max_num_draws), min(size - 1, count))
        for size in tokens
        for count in seqs
    }
    return sorted(size for size in sizes if size.num_seqs > 1 and size.num_draws > 2)


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the smallest of the ascending `sizes` that is at least `wanted`; None if none is."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None

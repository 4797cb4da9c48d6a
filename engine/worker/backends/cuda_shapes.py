"""The captured sizes of steps on a GPU."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from baton.kernels.attention import SHORT_CONTEXTS

from ...core.step import StepSize
from ..shapes import StepLimits, StepShape, at_least, decode_sizes

# Between 128 and 256 tokens, only the size that suits matrix products best.
_CHUNK_TOKENS = (16, 32, 64, 128, 208, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_CHUNK_SEQS = (1, 8, 64, 256)  # with 1, because a single prompt is the most frequent mix in a lightly loaded engine
_DRAFTED_CHUNK_SEQS = (8, 64)  # of mixes with drafts, beside the largest possible number


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

    def fitting(self, sizes: Sequence[StepSize], *, single_seq_len: int) -> StepShape | None:
        if any(size.all_hidden for size in sizes):
            return None
        num_seqs, num_tokens = max(size.num_seqs for size in sizes), max(size.num_tokens for size in sizes)
        if all(size.num_seqs == size.num_tokens for size in sizes):
            return self.decode(num_seqs, single_seq_len)
        max_drafts = max(size.max_drafts for size in sizes)
        if all(size.only_decodes for size in sizes):
            return self.drafted(num_seqs, num_tokens, single_seq_len=single_seq_len, longest=1 + max_drafts)
        if max_drafts:
            return self.drafted_chunks(num_seqs, num_tokens, max(size.num_draws for size in sizes))
        return self.chunks(num_seqs, num_tokens)

    def num_wanted(self, size: StepSize) -> int:
        return size.num_tokens if size.all_hidden else size.num_draws

    def decode(self, num_seqs: int, single_seq_len: int) -> StepShape | None:
        """Return the size for one token of each of `num_seqs` sequences. `single_seq_len`: see `fitting`."""
        size = at_least(self._decodes, num_seqs)
        if size is None:
            return None
        context = at_least(self._contexts, single_seq_len) if size == 1 else None
        return self._decode(size) if context is None else self._one_decode(context)

    def drafted(self, num_seqs: int, num_tokens: int, *, single_seq_len: int, longest: int) -> StepShape | None:
        """Return the size for decodes with drafts; None if no captured size is large enough.

        `single_seq_len`: see `fitting`.
        """
        wanted = (num_seqs, num_tokens, longest)
        size = next((size for size in self._drafted if all(map(operator.ge, size, wanted))), None)
        if size is None:
            return None
        context = at_least(self._contexts, single_seq_len) if size.num_seqs == 1 else None
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

"""The captured sizes of steps on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...core.step import StepSize
from ..shapes import StepLimits, StepShape, at_least, decode_sizes

_CHUNK_TOKENS = (64, 128, 256, 512)


class CpuShapes:
    """Decodes of one token each, decodes with drafts, and mixes of chunks of up to 512 tokens.

    With more tokens, the native calls take so long that the Python between them does not matter. Only tokens that are
    sampled from or scored are wanted; in a step of decodes with drafts, all are.
    """

    def __init__(self, limits: StepLimits) -> None:
        self._max_num_seqs = limits.max_num_seqs
        self._max_model_len = limits.max_model_len
        self._decodes = decode_sizes(limits.max_num_seqs)
        largest = min(limits.max_num_batched_tokens, _CHUNK_TOKENS[-1])
        self._tokens = [size for size in _CHUNK_TOKENS if size < largest] + [largest] * (largest > 1)
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

    def fitting(self, sizes: Sequence[StepSize], *, single_seq_len: int) -> StepShape | None:
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

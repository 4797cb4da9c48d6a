"""Which sizes of steps are captured, and which of them serves a step.

A captured step has a fixed number of sequences and tokens. A smaller step is filled up with padding to the next size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.kernels.attention import SHORT_CONTEXTS

from ..step_sizes import at_least, decode_sizes

# Between 128 and 256 the size that suits matrix products best: see `step_sizes`.
_CHUNK_TOKENS = (16, 32, 64, 128, 208, 256, 384, 512, 768, 1024, 1536, 2048)
_CHUNK_SEQS = (1, 8, 64, 256)  # a single prompt is what a lightly loaded engine sees most


@dataclass(frozen=True)
class StepShape:
    """The size of a step, and what its sequences may look like."""

    num_seqs: int
    num_tokens: int
    num_decodes: int  # so many sequences at the front have one token each and are served by the kernels for decodes
    max_query_len: int
    max_seq_len: int
    num_kv_tokens: int | None = None  # of all sequences behind the decodes; None where a graph must serve any
    all_hidden: bool = False  # hidden states of all tokens are wanted, not only of the last of each sequence

    @property
    def is_decode(self) -> bool:
        return self.num_decodes == self.num_tokens


class CapturedShapes:
    """The sizes that are captured: decodes of one token each, and mixes of chunks of any length.

    In a captured mix the kernels for chunks serve every sequence, single tokens included: how many of those a step has
    is no part of its size.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, max_tokens: int) -> None:
        """Chunks are captured up to `max_tokens` tokens a step."""
        self._max_model_len = max_model_len
        self._decodes = decode_sizes(max_num_seqs)
        self._contexts = [context for context in SHORT_CONTEXTS if context < max_model_len]
        largest = min(max_tokens, max_num_batched_tokens)
        self._tokens = [size for size in _CHUNK_TOKENS if size < largest] + [largest] * (largest > 0)
        self._seqs = [size for size in _CHUNK_SEQS if size < max_num_seqs] + [max_num_seqs]

    @property
    def padding(self) -> StepShape:
        """One sequence and token that are nobody's."""
        return self._any(1)

    def decode(self, num_seqs: int, alone: int) -> StepShape | None:
        """For a step of one token of each of `num_seqs` sequences. `alone`: tokens of the sequence, if it is one."""
        size = at_least(self._decodes, num_seqs)
        if size is None:
            return None
        context = at_least(self._contexts, alone) if size == 1 else None
        return self._any(size) if context is None else self._alone(context)

    def chunks(self, num_seqs: int, num_tokens: int) -> StepShape | None:
        """For a step of any chunks; None where nothing so large is captured."""
        tokens, seqs = at_least(self._tokens, num_tokens), at_least(self._seqs, num_seqs)
        return None if tokens is None or seqs is None else self._mix(min(seqs, tokens), tokens)

    def largest_first(self) -> Iterator[StepShape]:
        """Every captured size, once."""
        mixes = {(min(seqs, tokens), tokens) for tokens in self._tokens for seqs in self._seqs}
        for seqs, tokens in sorted(mixes, key=lambda size: (size[1], size[0]), reverse=True):
            yield self._mix(seqs, tokens)
        for size in reversed(self._decodes):
            yield self._any(size)
        for context in self._contexts:
            yield self._alone(context)

    def _alone(self, context: int) -> StepShape:
        """Of one short sequence, what a lightly loaded engine sees most: its attention has kernels of its own."""
        return StepShape(1, 1, 1, 1, context)

    def _any(self, num_seqs: int) -> StepShape:
        return StepShape(num_seqs, num_seqs, num_seqs, 1, self._max_model_len)

    def _mix(self, num_seqs: int, num_tokens: int) -> StepShape:
        return StepShape(num_seqs, num_tokens, 0, min(num_tokens, self._max_model_len), self._max_model_len)

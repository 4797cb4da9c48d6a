"""Sizes of steps. `Shapes` says which are captured on one kind of device, and which captured size serves a step.

A captured step has fixed numbers of sequences and tokens. A smaller step is padded to the next size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.speculation.config import MAX_DRAFTED_TOKENS
from ..core.step import StepSize

# Numbers of decodes for which torch's matrix products take longer than for the next larger number.
_SLOW_DECODES = frozenset({192, 224, 240})


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


class Shapes(Protocol):
    """The captured sizes of one kind of device."""

    @property
    def padding(self) -> StepShape:
        """One padding sequence of one padding token: the step of a rank that has nothing to do."""
        ...

    def in_capture_order(self) -> Iterator[StepShape]:
        """Yield every captured size once."""
        ...

    def fitting(self, sizes: Sequence[StepSize], *, single_seq_len: int) -> StepShape | None:
        """Return the smallest size that serves steps of all these sizes; None if there is none.

        `single_seq_len`: the length of this rank's sequence, if it has only one, else 0. It must not affect anything on
        which the ranks of a group have to agree.
        """
        ...

    def num_wanted(self, size: StepSize) -> int:
        """Return how many tokens go through the whole last layer in a step of this size that is not captured."""
        ...


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of decodes that are captured, ascending to `max_num_seqs`: by 8, then by 16, then by 32."""
    sizes, size = [], 1
    while size < max_num_seqs:
        if size not in _SLOW_DECODES:
            sizes.append(size)
        size += size if size < 8 else 8 if size < 64 else 16 if size < 256 else 32
    return [*sizes, max_num_seqs]


def at_least(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the smallest of the ascending `sizes` that is at least `wanted`; None if none is."""
    index = bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None

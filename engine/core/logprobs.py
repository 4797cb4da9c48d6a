"""Log probabilities of tokens, packed: one object for many positions, the same in one process and on the wire.

    token_ids   int32    own  best  second ...  |  own  best ...     `width` values for each position
    logprobs    float32  own  best  second ...  |  own  best ...
    ranks       int32    own                    |  own               1 is the most likely of the vocabulary

A prompt may have hundreds of thousands of values. If each were an object, the processes that encode, decode, collect or
free them would stall. So objects are made only for display, for a few positions at a time.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import msgspec

VALUE_BYTES = 4


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities at one position. Entry 0 is the token itself, the rest are the top ones, best first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rank: int  # of the token itself among the whole vocabulary, 1 is the most likely


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at consecutive positions, little-endian, in the layout above."""

    width: int  # values for each position: the token itself, and its alternatives
    token_ids: bytes = b""
    logprobs: bytes = b""
    ranks: bytes = b""

    def __post_init__(self) -> None:
        num_bytes = len(self.ranks) * self.width
        if self.width < 1 or len(self.ranks) % VALUE_BYTES or {len(self.token_ids), len(self.logprobs)} != {num_bytes}:
            raise ValueError("columns of log probabilities differ in length")

    @classmethod
    def pack(cls, entries: Sequence[TokenLogprobs]) -> Self:
        """Pack at least one position. All positions have equally many alternatives."""
        token_ids = list(itertools.chain.from_iterable(entry.token_ids for entry in entries))
        logprobs = list(itertools.chain.from_iterable(entry.logprobs for entry in entries))
        return cls(
            len(entries[0].token_ids),
            struct.pack(f"<{len(token_ids)}i", *token_ids),
            struct.pack(f"<{len(logprobs)}f", *logprobs),
            struct.pack(f"<{len(entries)}i", *(entry.rank for entry in entries)),
        )

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Join at least one part. All parts have equally many alternatives."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            parts[0].width,
            b"".join([part.token_ids for part in parts]),
            b"".join([part.logprobs for part in parts]),
            b"".join([part.ranks for part in parts]),
        )

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.ranks) // VALUE_BYTES

    def __getitem__(self, index: int) -> TokenLogprobs:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return next(self.entries(index, index + 1))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return self.entries(0, len(self))

    @property
    def num_values(self) -> int:
        return len(self) * self.width

    def entries(self, start: int, stop: int) -> Iterator[TokenLogprobs]:
        """Yield the entries of positions `start` to `stop`, unpacked together."""
        count, width = stop - start, self.width
        values, offset = count * width, start * width * VALUE_BYTES
        token_ids = struct.unpack_from(f"<{values}i", self.token_ids, offset)
        logprobs = struct.unpack_from(f"<{values}f", self.logprobs, offset)
        ranks = struct.unpack_from(f"<{count}i", self.ranks, start * VALUE_BYTES)
        for row, rank in enumerate(ranks):
            begin, end = row * width, (row + 1) * width
            yield TokenLogprobs(token_ids[begin:end], logprobs[begin:end], rank)

    def part(self, start: int, stop: int) -> Logprobs:
        """Return positions `start` to `stop`, still packed."""
        if start == 0 and stop >= len(self):
            return self
        begin, end = start * self.width * VALUE_BYTES, stop * self.width * VALUE_BYTES
        ranks = self.ranks[start * VALUE_BYTES : stop * VALUE_BYTES]
        return Logprobs(self.width, self.token_ids[begin:end], self.logprobs[begin:end], ranks)

    def at(self, index: int, width: int) -> Logprobs:
        """Return one position, cut to its first `width` values."""
        width = min(width, self.width)
        begin, rank = index * self.width * VALUE_BYTES, index * VALUE_BYTES
        end = begin + width * VALUE_BYTES
        return Logprobs(
            width, self.token_ids[begin:end], self.logprobs[begin:end], self.ranks[rank : rank + VALUE_BYTES]
        )

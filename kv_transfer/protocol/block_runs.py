"""The blocks of a ticket, as runs of ascending neighbours: `[first, count]` in msgpack, with numbers of any width.

    0xdd n    0x92 0xce first 0xce count    0x92 0xce first 0xce count    ...        n runs of 11 bytes each

Many blocks are written so, with 4 bytes a number. Every msgpack decoder reads that; since all runs have one size, we
write and read them as one array, without an object for each: thousands of blocks that lie apart are as many runs. A few
blocks, and runs of other widths, as engines of other versions write them, are written and read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from .. import codec
from ..codec import BlockNumber
from ..errors import MalformedMessage

MAX_BLOCKS = 1 << 22  # in one ticket: 67 million tokens
ARRAY_RUNS = 64  # from so many on, runs are written and read as an array; an array of fewer takes longer than objects

BlockNumbers = NDArray[np.int64]  # one for each block, in order

_HEADER = b"\xdd"  # an array of up to 2**32 - 1 entries, whose number follows in 4 bytes
_HEADER_BYTES = 5
_PAIR, _UINT32 = b"\x92", b"\xce"
_EMPTY_RUN = _PAIR + 2 * (_UINT32 + bytes(4))
_RUN_BYTES, _NUMBER_BYTES = 11, 5  # of a run, and of a number with its type
_BIG_ENDIAN = np.dtype(">u4")


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """Blocks first, first + 1, ... first + count - 1."""

    first: BlockNumber
    count: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]


class BlockRuns(NamedTuple):
    """Decoded runs: run i has the `counts[i]` blocks from `firsts[i]` on."""

    firsts: Sequence[int] | BlockNumbers
    counts: Sequence[int] | BlockNumbers
    num_blocks: int  # of all runs

    @property
    def blocks(self) -> BlockNumbers:
        """A new array of the blocks of all runs, in order."""
        firsts = np.array(self.firsts, dtype=np.int64)
        if self.num_blocks == len(firsts):
            return firsts
        counts = np.asarray(self.counts)
        begins = np.cumsum(counts) - counts
        return np.repeat(firsts - begins, counts) + np.arange(self.num_blocks)


_decode_runs: Callable[[msgspec.Raw], list[BlockRun]] = codec.decoder(list[BlockRun], "runs of blocks")


def encode_runs(block_ids: Sequence[int]) -> msgspec.Raw:
    """Encode block ids, below 2**32, as runs, in order. Ascending neighbours share a run."""
    if len(block_ids) < ARRAY_RUNS:
        return msgspec.Raw(codec.encode(_runs_of(block_ids)))
    blocks = np.asarray(block_ids, dtype=np.int64)
    assert np.maximum.reduce(blocks.view(np.uint64)) < 2**32, "no engine has so many blocks, or negative numbers"
    begins = np.empty(len(blocks), dtype=np.bool_)
    begins[0] = True
    np.not_equal(blocks[1:], blocks[:-1] + 1, out=begins[1:])
    starts = begins.nonzero()[0]
    encoded = bytearray(_HEADER + len(starts).to_bytes(4, "big") + len(starts) * _EMPTY_RUN)
    firsts, counts = _numbers(encoded, len(starts))
    firsts[:] = blocks[starts]
    counts[:-1] = starts[1:] - starts[:-1]
    counts[-1] = len(blocks) - starts[-1]
    return msgspec.Raw(encoded)


def _runs_of(block_ids: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for block in block_ids:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    return runs


def decode_runs(encoded: msgspec.Raw) -> BlockRuns:
    """Decode runs. Raises `MalformedMessage` for other bytes, an empty run, or more than `MAX_BLOCKS` blocks in all."""
    data = memoryview(encoded)
    num_runs, rest = divmod(len(data) - _HEADER_BYTES, _RUN_BYTES)
    if num_runs >= ARRAY_RUNS and rest == 0 and data[:_HEADER_BYTES] == _HEADER + num_runs.to_bytes(4, "big"):
        pairs = np.ndarray(num_runs, np.uint8, data, offset=_HEADER_BYTES, strides=_RUN_BYTES)
        types = np.ndarray((2, num_runs), np.uint8, data, offset=_HEADER_BYTES + 1, strides=(_NUMBER_BYTES, _RUN_BYTES))
        if pairs.tobytes() == num_runs * _PAIR and types.tobytes() == 2 * num_runs * _UINT32:
            firsts, counts = _numbers(data, num_runs).astype(np.int64)
            num_blocks = int(np.add.reduce(counts))
            if not counts.all() or num_blocks > MAX_BLOCKS:
                raise _too_many(num_runs, num_blocks)
            return BlockRuns(firsts, counts, num_blocks)
    runs = _decode_runs(encoded)
    counted = [run.count for run in runs]
    if sum(counted) > MAX_BLOCKS:
        raise _too_many(len(runs), sum(counted))
    return BlockRuns([run.first for run in runs], counted, sum(counted))


def _numbers(encoded: bytearray | memoryview, num_runs: int) -> NDArray[np.uint32]:
    """View the numbers of encoded runs, big endian: [0] are the first blocks, [1] the counts."""
    offset, strides = _HEADER_BYTES + 2, (_NUMBER_BYTES, _RUN_BYTES)
    return np.ndarray((2, num_runs), _BIG_ENDIAN, encoded, offset=offset, strides=strides)


def _too_many(num_runs: int, num_blocks: int) -> MalformedMessage:
    return MalformedMessage(
        f"{num_runs} runs have {num_blocks} blocks; at most {MAX_BLOCKS} are allowed, and one or more in each run"
    )

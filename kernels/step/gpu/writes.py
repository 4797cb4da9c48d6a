"""Changes to tables, applied by one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..buffers import PIECE

WRITERS = 256  # programs that apply pieces: more than a step has but when hundreds of requests start at once


def apply_writes(memory: Tensor, pieces: Tensor, values: Tensor, num_pieces: Tensor) -> None:
    writers = min(WRITERS, len(pieces))
    _apply_writes[(writers,)](memory, pieces, values, num_pieces, writers, BLOCK=PIECE, num_warps=4)


@triton.jit(do_not_specialize=["writers"])
def _apply_writes(memory, pieces, values, num_pieces, writers, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), tl.load(num_pieces), writers):
        piece = pieces + index * 3
        to, source, count = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
        mask = offsets < count
        tl.store(memory + to + offsets, tl.load(values + source + offsets, mask=mask), mask=mask)

"""The sequence that each token of a step belongs to."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 128  # tokens or sequences of one program


@triton.jit
def owners(token, query_start, num_seqs, BLOCK: tl.constexpr):
    """Return the last sequence that begins at or before each token; where some are empty, the last of those."""
    first = tl.zeros([BLOCK], tl.int32)
    last = tl.zeros([BLOCK], tl.int32) + num_seqs - 1
    while tl.max(last - first) > 0:
        middle = (first + last + 1) // 2
        before = tl.load(query_start + middle) <= token
        first = tl.where(before, middle, first)
        last = tl.where(before, last, middle - 1)
    return first

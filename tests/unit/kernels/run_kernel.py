"""A kernel that stores the lengths of runs of chunks. Triton reads its source from this file."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.ssd.gpu.chunk_runs import length_of_run


@triton.jit
def length_from_each(chunk_start, checkpoints, lengths, end_chunk, CHUNK: tl.constexpr):
    """Write the length of the longest run from each chunk on; a program per chunk."""
    first = tl.program_id(0)
    tl.store(lengths + first, length_of_run(chunk_start, checkpoints, first, end_chunk, CHUNK))

"""Runs: chunks of a sequence that a scan can process in one loop, with addresses that need no loads.

A loop whose addresses depend on values that it loads is not pipelined well: the compiler starts loading a chunk's tiles
only when it has finished the chunk before. In a run all chunks but the last have CHUNK tokens, and no checkpoint is
between them, so its loop needs neither the chunks' first tokens nor a branch that stores a state.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_CHUNKS = tl.constexpr(512)  # of a run, a power of two


@triton.jit
def length_of_run(chunk_start, checkpoints, first_chunk, end_chunk, CHUNK: tl.constexpr):
    """Return the number of chunks in the longest run from `first_chunk` on, at least 1, before `end_chunk`."""
    index = tl.arange(0, MOST_CHUNKS)
    chunk = first_chunk + index
    exists = chunk < end_chunk
    begin = tl.load(chunk_start + first_chunk)
    follows = tl.load(chunk_start + chunk, mask=exists, other=-1) == begin + index * CHUNK
    is_kept = tl.load(checkpoints + chunk - 1, mask=exists & (index > 0), other=-1) >= 0
    return tl.min(tl.where(exists & follows & ~is_kept, MOST_CHUNKS, index), axis=0)

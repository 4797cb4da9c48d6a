"""Time steps, and the decay of states over them: for one token, and summed over each chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl
from baton.kernels.split_kv import LOG2_E

FACTORS = tl.constexpr(2)  # vectors of a chunk and head:
TOTAL, STEP = (tl.constexpr(number) for number in range(2))


@triton.jit
def time_step(raw, bias, lowest, highest):
    """Return dt, given the output of the projection; `bias` may be None."""
    value = raw.to(tl.float32)
    if bias is not None:
        value += bias
    # log(1 + e^-|x|), by its series where 1 + e^-|x| has lost digits
    y = tl.exp(-tl.abs(value))
    series = y * (1 - y * (1 / 2 - y * (1 / 3 - y * (1 / 4))))
    value = tl.maximum(value, 0.0) + tl.where(y < 1 / 32, series, tl.log(1.0 + y))
    return tl.minimum(tl.maximum(value, lowest), highest)


@triton.jit
def log2_rate(log_rate):
    """Return A in units of log 2."""
    return -tl.exp(log_rate) * LOG2_E


@triton.jit
def sum_time_steps(
    raw,  # [T, NUM_HEADS], tokens raw_stride apart
    log_rate,  # [NUM_HEADS] float32
    bias,  # [NUM_HEADS] float32 or None
    chunk_start,  # [num_chunks + 1]
    factors,  # [num_chunks, NUM_HEADS, FACTORS, CHUNK] float32: G, the sum of dt A up to and with a token; dt
    raw_stride,
    lowest,
    highest,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
    CHUNK: tl.constexpr,
):
    pdl.let_next_start()
    chunk = tl.program_id(1)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    row = tl.arange(0, CHUNK)
    first = tl.load(chunk_start + chunk)
    count = tl.load(chunk_start + chunk + 1) - first
    is_head = head < NUM_HEADS
    known = (row < count)[:, None] & is_head[None, :]
    rate = log2_rate(tl.load(log_rate + head, mask=is_head, other=0.0))
    offset = None
    if bias is not None:
        offset = tl.load(bias + head, mask=is_head, other=0.0)[None, :]
    pdl.wait_for_previous()
    if count == 0:
        return
    token = first.to(tl.int64) + row
    given = tl.load(raw + token[:, None] * raw_stride + head[None, :], mask=known, other=0.0)
    dt = tl.where(known, time_step(given, offset, lowest, highest), 0.0)
    total = tl.cumsum(dt * rate[None, :], axis=0)
    place = chunk.to(tl.int64) * NUM_HEADS + head
    cells = factors + place[None, :] * FACTORS * CHUNK + row[:, None]
    tl.store(cells + TOTAL * CHUNK, total, mask=is_head[None, :])
    tl.store(cells + STEP * CHUNK, dt, mask=is_head[None, :])

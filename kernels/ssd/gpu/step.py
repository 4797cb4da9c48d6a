"""Decodes: a program has some rows of one head's state in its registers and goes token by token.

So a state is read once, written once, and reduced over its columns once a token. Its cells are prefetched while the
kernel before this one still runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .time_steps import log2_rate, time_step


@triton.jit
def step_tokens(
    x,  # [T, NUM_HEADS, HEAD_DIM], tokens x_stride apart
    b,  # [T, NUM_HEADS / GROUP, STATE_DIM], tokens b_stride apart
    c,
    raw,  # [T, NUM_HEADS], tokens raw_stride apart
    log_rate,  # [NUM_HEADS] float32
    bias,  # [NUM_HEADS] float32 or None
    skip,  # [NUM_HEADS] float32 or None
    state,  # [slots, NUM_HEADS, HEAD_DIM, STATE_DIM] float32, slots state_stride apart
    query_start,
    sources,
    targets,
    num_decodes,
    out,  # [T, NUM_HEADS, HEAD_DIM], tokens out_stride apart
    x_stride,
    b_stride,
    c_stride,
    raw_stride,
    state_stride,
    out_stride,
    lowest,
    highest,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # rows of a program
    PREFETCH: tl.constexpr,  # cells of the state that lie in one line of the cache, 0: none are prefetched
):
    pdl.let_next_start()
    seq = tl.program_id(2)
    head = tl.program_id(1)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    dim = tl.arange(0, STATE_DIM)
    begin = tl.load(query_start + seq)
    end = tl.where(seq < tl.load(num_decodes), tl.load(query_start + seq + 1), begin)
    source = tl.load(sources + seq).to(tl.int64)
    target = tl.load(targets + seq).to(tl.int64)
    from_arena = source >= 0 and begin < end
    rows = head * HEAD_DIM * STATE_DIM + value[:, None] * STATE_DIM
    if PREFETCH > 0:  # noqa: SIM102  (the first is known to the compiler)
        if from_arena:
            line = tl.arange(0, STATE_DIM // PREFETCH) * PREFETCH
            pdl.prefetch(state + source * state_stride + rows + line[None, :])
    rate = log2_rate(tl.load(log_rate + head))
    offset = None
    if bias is not None:
        offset = tl.load(bias + head)
    inner = rows + dim[None, :]
    pdl.wait_for_previous()
    kept = tl.zeros([VALUES, STATE_DIM], tl.float32)
    if from_arena:
        kept = tl.load(state + source * state_stride + inner)
    for index in range(begin, end):
        token = tl.cast(index, tl.int64)
        values = tl.load(x + token * x_stride + head * HEAD_DIM + value).to(tl.float32)
        writes = tl.load(b + token * b_stride + head // GROUP * STATE_DIM + dim).to(tl.float32)
        reads = tl.load(c + token * c_stride + head // GROUP * STATE_DIM + dim).to(tl.float32)
        dt = time_step(tl.load(raw + token * raw_stride + head), offset, lowest, highest)
        kept = kept * tl.exp2(dt * rate) + (dt * values)[:, None] * writes[None, :]
        result = tl.sum(kept * reads[None, :], axis=1)
        if skip is not None:
            result += tl.load(skip + head) * values
        cells = out + token * out_stride + head * HEAD_DIM + value
        tl.store(cells, result.to(out.dtype.element_ty))
    if target >= 0 and begin < end:
        tl.store(state + target * state_stride + inner, kept)

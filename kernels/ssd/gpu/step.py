"""Decodes: a program has some rows of one head's state in registers, and processes token by token.

So a state is read once, written once, and reduced over its columns once per token. It is prefetched while the previous
kernel still runs.

With drafts, the state first advances by the previous step's accepted drafts, whose inputs were stored at places of the
row. The state is written after the step's first token. The inputs of the other tokens, which are drafts, are stored at
places that no program still reads.
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
    draft_x,  # [places, NUM_HEADS, HEAD_DIM], all places drafts_stride apart; None: no decode has drafts
    draft_b,  # [places, NUM_HEADS / GROUP, STATE_DIM]
    draft_raw,  # [places, NUM_HEADS]
    replay_rows,
    replay_starts,
    replay_counts,
    x_stride,
    b_stride,
    c_stride,
    raw_stride,
    state_stride,
    out_stride,
    drafts_stride,
    lowest,
    highest,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    NUM_PLACES: tl.constexpr,  # of a row, 0 without drafts
    VALUES: tl.constexpr,  # rows of a program
    PREFETCH: tl.constexpr,  # values of the state in one cache line; 0: no prefetch
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
    value_cells = head * HEAD_DIM + value
    group_cells = head // GROUP * STATE_DIM + dim
    if NUM_PLACES > 0:
        own = tl.load(replay_rows + seq).to(tl.int64) * NUM_PLACES
        start = tl.load(replay_starts + seq)
        count = tl.where(begin < end, tl.load(replay_counts + seq), 0)
        for position in range(start - count, start):
            place = (own + position % NUM_PLACES) * drafts_stride
            values = tl.load(draft_x + place + value_cells).to(tl.float32)
            writes = tl.load(draft_b + place + group_cells).to(tl.float32)
            dt = time_step(tl.load(draft_raw + place + head), offset, lowest, highest)
            kept = kept * tl.exp2(dt * rate) + (dt * values)[:, None] * writes[None, :]
    for index in range(begin, end):
        token = tl.cast(index, tl.int64)
        raw_values = tl.load(x + token * x_stride + value_cells)
        raw_writes = tl.load(b + token * b_stride + group_cells)
        reads = tl.load(c + token * c_stride + group_cells).to(tl.float32)
        raw_step = tl.load(raw + token * raw_stride + head)
        values, writes = raw_values.to(tl.float32), raw_writes.to(tl.float32)
        dt = time_step(raw_step, offset, lowest, highest)
        kept = kept * tl.exp2(dt * rate) + (dt * values)[:, None] * writes[None, :]
        result = tl.sum(kept * reads[None, :], axis=1)
        if skip is not None:
            result += tl.load(skip + head) * values
        cells = out + token * out_stride + value_cells
        tl.store(cells, result.to(out.dtype.element_ty))
        if NUM_PLACES > 0:
            if index == begin:
                if target >= 0:
                    tl.store(state + target * state_stride + inner, kept)
            else:
                place = (own + (start + index - begin) % NUM_PLACES) * drafts_stride
                tl.store(draft_x + place + value_cells, raw_values)
                if tl.program_id(0) == 0:
                    tl.store(draft_raw + place + head, raw_step)
                    if head % GROUP == 0:
                        tl.store(draft_b + place + group_cells, raw_writes)
    if NUM_PLACES == 0:  # noqa: SIM102  (the first is known to the compiler)
        if target >= 0 and begin < end:
            tl.store(state + target * state_stride + inner, kept)

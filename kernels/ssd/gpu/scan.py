"""Computes the states from chunk to chunk, and outputs. A program has one head of one sequence's segment.

    weights[j, i] = (B_j . C_i) e^(G_i - G_j) dt_j   j <= i        G: the sum of dt A up to and including a token
    out^T         = (S C^T) e^G + x^T weights                      D is added on the diagonal of the weights
    S             = e^G_last S + (x e^(G_last - G) dt)^T B

Outputs are transposed, head dimensions first, so that the state is a product's left operand directly from registers.

If there are too few heads and sequences for a device, sequences are divided into segments, which are scanned in
parallel. `sum_segments` first advances the states over each segment by itself; a scan starts with the sum of those
before it.

Addresses of rows contain min(chunk, 0). It is always 0, but the compiler does not know that. So it computes addresses
for each chunk, instead of keeping them in registers from before the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .chunk_runs import length_of_run
from .time_steps import FACTORS, STEP, TOTAL


@triton.jit
def chunks_of_segment(seq_chunks, segment, SEGMENTS: tl.constexpr):
    """Return the first and the end of a segment's chunks, of the sequence's, and whether they are its last ones."""
    first = tl.load(seq_chunks)
    end = tl.load(seq_chunks + 1)
    size = tl.cdiv(end - first, SEGMENTS)
    own_first = tl.minimum(first + segment * size, end)
    own_end = tl.minimum(own_first + size, end)
    return own_first, own_end, (own_end == end) & (own_first < own_end)


@triton.jit
def start_of_segment(starts, totals, place, segment, inner, state_size, SEGMENTS: tl.constexpr):
    """Return the state before a segment, given what `sum_segments` wrote for the ones before it."""
    own = starts + place * SEGMENTS * state_size + inner
    if segment == 0:
        kept = tl.load(own)
    else:
        kept = tl.load(own + state_size)
    for before in range(1, segment):
        total = tl.load(totals + place * SEGMENTS + before)
        kept = kept * tl.exp2(total) + tl.load(own + (before + 1) * state_size)
    return kept


@triton.jit(do_not_specialize=["first_seq"])
def sum_segments(
    x,  # these and the next as in `scan_chunks`
    b,
    factors,
    state,
    sources,
    chunk_start,
    checkpoints,
    seq_chunks,
    starts,  # [sequences, NUM_HEADS, SEGMENTS, HEAD_DIM, STATE_DIM] float32: the state before the first segment; of
    # each but the last, what its tokens add to a state, and in the first one the state before it, too
    totals,  # [sequences, NUM_HEADS, SEGMENTS] float32: the binary logarithms of the decays over segments
    first_seq,
    x_stride,
    b_stride,
    state_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Advance the states over all segments but each sequence's last one, without outputs."""
    pdl.let_next_start()
    seq = tl.program_id(2) // (SEGMENTS - 1)
    segment = tl.program_id(2) % (SEGMENTS - 1)
    head = tl.program_id(1)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    dim = tl.arange(0, STATE_DIM)
    first_chunk, end_chunk, _ = chunks_of_segment(seq_chunks + first_seq + seq, segment, SEGMENTS)
    source = tl.load(sources + first_seq + seq).to(tl.int64)
    inner = value[:, None] * STATE_DIM + dim[None, :]
    state_size = HEAD_DIM * STATE_DIM
    place = seq.to(tl.int64) * NUM_HEADS + head
    own = starts + place * SEGMENTS * state_size + inner
    pdl.wait_for_previous()
    kept = tl.zeros([VALUES, STATE_DIM], tl.float32)
    sum_of_totals = 0.0
    if segment == 0:
        if source >= 0:
            kept = tl.load(state + source * state_stride + head * state_size + inner)
        tl.store(own, kept)
    while first_chunk < end_chunk:
        count = length_of_run(chunk_start, checkpoints, first_chunk, end_chunk, CHUNK)
        begin = tl.load(chunk_start + first_chunk)
        end = tl.load(chunk_start + first_chunk + count)
        for chunk in range(first_chunk, first_chunk + count):
            done = (chunk - first_chunk) * CHUNK
            token = begin.to(tl.int64) + done
            row = tl.arange(0, CHUNK) + tl.minimum(chunk, 0)
            known = (row < end - begin - done)[:, None]
            first_b = b + (token * b_stride + head // GROUP * STATE_DIM)
            first_x = x + (token * x_stride + head * HEAD_DIM)
            writes = tl.load(first_b + row[:, None] * b_stride + dim[None, :], mask=known, other=0.0)
            values = tl.load(first_x + row[:, None] * x_stride + value[None, :], mask=known, other=0.0)
            vectors = factors + (tl.cast(chunk, tl.int64) * NUM_HEADS + head) * FACTORS * CHUNK
            dt = tl.load(vectors + STEP * CHUNK + row)
            total = tl.load(vectors + TOTAL * CHUNK + row)
            last = tl.load(vectors + TOTAL * CHUNK + CHUNK - 1)
            written = tl.trans(values).to(tl.float32) * (tl.exp2(last - total) * dt)[None, :]
            kept = tl.dot(written.to(values.dtype), writes, kept * tl.exp2(last), input_precision=PRECISION)
            sum_of_totals += last
        first_chunk += count
    tl.store(own + (segment + 1) * state_size, kept)
    tl.store(totals + place * SEGMENTS + segment, sum_of_totals)


@triton.jit(do_not_specialize=["first_seq"])
def scan_chunks(
    x,  # [T, NUM_HEADS, HEAD_DIM], tokens x_stride apart
    b,  # [T, NUM_HEADS / GROUP, STATE_DIM], tokens b_stride apart
    c,
    factors,  # [num_chunks, NUM_HEADS, FACTORS, CHUNK] float32
    skip,  # [NUM_HEADS] float32 or None
    state,  # [slots, NUM_HEADS, HEAD_DIM, STATE_DIM] float32, slots state_stride apart
    sources,
    targets,
    chunk_start,
    checkpoints,
    seq_chunks,
    out,  # [T, NUM_HEADS, HEAD_DIM], tokens out_stride apart
    first_seq,
    starts,  # see `sum_segments`; None for one segment
    totals,
    x_stride,
    b_stride,
    c_stride,
    state_stride,
    out_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # dimensions of the head, of a program
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pdl.let_next_start()
    seq = tl.program_id(2) // SEGMENTS
    segment = tl.program_id(2) % SEGMENTS
    head = tl.program_id(1)
    group = head // GROUP
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    dim = tl.arange(0, STATE_DIM)
    index = tl.arange(0, CHUNK)
    first_chunk, end_chunk, is_last = chunks_of_segment(seq_chunks + first_seq + seq, segment, SEGMENTS)
    source = tl.load(sources + first_seq + seq).to(tl.int64)
    target = tl.load(targets + first_seq + seq).to(tl.int64)
    direct = 0.0
    if skip is not None:
        direct = tl.load(skip + head)
    state += head * HEAD_DIM * STATE_DIM
    inner = value[:, None] * STATE_DIM + dim[None, :]
    pdl.wait_for_previous()
    kept = tl.zeros([VALUES, STATE_DIM], tl.float32)
    if SEGMENTS == 1:
        from_arena = source >= 0 and first_chunk < end_chunk
        if from_arena:
            kept = tl.load(state + source * state_stride + inner)
    else:
        place = seq.to(tl.int64) * NUM_HEADS + head
        kept = start_of_segment(starts, totals, place, segment, inner, HEAD_DIM * STATE_DIM, SEGMENTS)
    while first_chunk < end_chunk:
        count = length_of_run(chunk_start, checkpoints, first_chunk, end_chunk, CHUNK)
        begin = tl.load(chunk_start + first_chunk)
        end = tl.load(chunk_start + first_chunk + count)
        for chunk in range(first_chunk, first_chunk + count):
            done = (chunk - first_chunk) * CHUNK
            token = begin.to(tl.int64) + done
            row = index + tl.minimum(chunk, 0)
            known = (row < end - begin - done)[:, None]
            b_cells = row[:, None] * b_stride + dim[None, :]
            c_cells = row[:, None] * c_stride + dim[None, :]
            x_cells = row[:, None] * x_stride + value[None, :]
            out_cells = row[:, None] * out_stride + value[None, :]
            first_x = x + (token * x_stride + head * HEAD_DIM)
            first_out = out + (token * out_stride + head * HEAD_DIM)
            writes = tl.load(b + (token * b_stride + group * STATE_DIM) + b_cells, mask=known, other=0.0)
            reads = tl.load(c + (token * c_stride + group * STATE_DIM) + c_cells, mask=known, other=0.0)
            values = tl.load(first_x + x_cells, mask=known, other=0.0)
            vectors = factors + (tl.cast(chunk, tl.int64) * NUM_HEADS + head) * FACTORS * CHUNK
            products = tl.dot(writes, tl.trans(reads), input_precision=PRECISION)
            result = tl.dot(kept.to(values.dtype), tl.trans(reads), input_precision=PRECISION)
            total = tl.load(vectors + TOTAL * CHUNK + index)
            dt = tl.load(vectors + STEP * CHUNK + index)
            last = tl.load(vectors + TOTAL * CHUNK + CHUNK - 1)
            between = tl.minimum(total[None, :] - total[:, None], 0.0)
            weights = products * tl.exp2(between) * dt[:, None]
            weights = tl.where(index[:, None] <= index[None, :], weights, 0.0)
            if skip is not None:
                weights = tl.where(index[:, None] == index[None, :], weights + direct, weights)
            columns = tl.trans(values)
            result *= tl.exp2(total)[None, :]
            result = tl.dot(columns, weights.to(values.dtype), result, input_precision=PRECISION)
            written = columns.to(tl.float32) * (tl.exp2(last - total) * dt)[None, :]
            kept = tl.dot(written.to(values.dtype), writes, kept * tl.exp2(last), input_precision=PRECISION)
            tl.store(first_out + out_cells, tl.trans(result.to(out.dtype.element_ty)), mask=known)
        first_chunk += count
        checkpoint = tl.load(checkpoints + first_chunk - 1).to(tl.int64)
        if checkpoint >= 0:
            tl.store(state + checkpoint * state_stride + inner, kept)
        if target >= 0 and is_last and first_chunk == end_chunk:
            tl.store(state + target * state_stride + inner, kept)

"""Computes the states from chunk to chunk, and outputs. A program has one or two heads of one sequence.

    weights[j, i] = (B_j . C_i) e^(G_i - G_j) dt_j   j <= i        G: the sum of dt A up to and including a token
    out^T         = (S C^T) e^G + x^T weights                      D is added on the diagonal of the weights
    S             = e^G_last S + (x e^(G_last - G) dt)^T B

Outputs are transposed, head dimensions first, so that the state is a product's left operand directly from registers.
The products of B and C are the same for all heads of a group: a program with two heads computes them once.

Addresses of rows contain min(begin, 0). It is always 0, but the compiler does not know that. So it computes addresses
for each chunk, instead of keeping them in registers from before the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .time_steps import FACTORS, STEP, TOTAL


@triton.jit
def advance_head(
    kept,  # [VALUES, STATE_DIM] float32: the state before the chunk
    values,  # [CHUNK, VALUES]
    writes,  # [CHUNK, STATE_DIM]: B
    reads,  # [CHUNK, STATE_DIM]: C
    products,  # [CHUNK, CHUNK] float32: of each row of B with each of C
    vectors,  # the chunk's and head's factors
    direct,  # D
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,  # of products of float32
):
    """Return the state after the chunk, and the outputs of its tokens [VALUES, CHUNK]."""
    row = tl.arange(0, CHUNK)
    total = tl.load(vectors + TOTAL * CHUNK + row)
    dt = tl.load(vectors + STEP * CHUNK + row)
    last = tl.load(vectors + TOTAL * CHUNK + CHUNK - 1)
    between = tl.minimum(total[None, :] - total[:, None], 0.0)
    weights = products * tl.exp2(between) * dt[:, None]
    weights = tl.where(row[:, None] <= row[None, :], weights, 0.0)
    weights = tl.where(row[:, None] == row[None, :], weights + direct, weights)
    columns = tl.trans(values)
    result = tl.dot(kept.to(values.dtype), tl.trans(reads), input_precision=PRECISION) * tl.exp2(total)[None, :]
    result = tl.dot(columns, weights.to(values.dtype), result, input_precision=PRECISION)
    written = columns.to(tl.float32) * (tl.exp2(last - total) * dt)[None, :]
    kept = tl.dot(written.to(values.dtype), writes, kept * tl.exp2(last), input_precision=PRECISION)
    return kept, result


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
    x_stride,
    b_stride,
    c_stride,
    state_stride,
    out_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # of a program, 1 or 2; divides GROUP
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # dimensions of each head of a program
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pdl.let_next_start()
    seq = tl.program_id(2)
    head = tl.program_id(1) * HEADS
    group = head // GROUP
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    dim = tl.arange(0, STATE_DIM)
    first_chunk = tl.load(seq_chunks + first_seq + seq)
    end_chunk = tl.load(seq_chunks + first_seq + seq + 1)
    source = tl.load(sources + first_seq + seq).to(tl.int64)
    target = tl.load(targets + first_seq + seq).to(tl.int64)
    direct, second_direct = 0.0, 0.0
    if skip is not None:
        direct = tl.load(skip + head)
        second_direct = tl.load(skip + head + HEADS - 1)
    state += head * HEAD_DIM * STATE_DIM
    inner = value[:, None] * STATE_DIM + dim[None, :]
    next_head = HEAD_DIM * STATE_DIM
    pdl.wait_for_previous()
    from_arena = source >= 0 and first_chunk < end_chunk
    kept = tl.zeros([VALUES, STATE_DIM], tl.float32)
    second = tl.zeros([VALUES, STATE_DIM], tl.float32)
    if from_arena:
        kept = tl.load(state + source * state_stride + inner)
        if HEADS == 2:
            second = tl.load(state + source * state_stride + next_head + inner)
    for chunk in range(first_chunk, end_chunk):
        begin = tl.load(chunk_start + chunk)
        end = tl.load(chunk_start + chunk + 1)
        token = begin.to(tl.int64)
        row = tl.arange(0, CHUNK) + tl.minimum(begin, 0)
        known = (row < end - begin)[:, None]
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
        kept, result = advance_head(kept, values, writes, reads, products, vectors, direct, CHUNK, PRECISION)
        tl.store(first_out + out_cells, tl.trans(result.to(out.dtype.element_ty)), mask=known)
        if HEADS == 2:
            values = tl.load(first_x + HEAD_DIM + x_cells, mask=known, other=0.0)
            vectors += FACTORS * CHUNK
            second, result = advance_head(
                second, values, writes, reads, products, vectors, second_direct, CHUNK, PRECISION
            )
            tl.store(first_out + HEAD_DIM + out_cells, tl.trans(result.to(out.dtype.element_ty)), mask=known)
        checkpoint = tl.load(checkpoints + chunk).to(tl.int64)
        if checkpoint >= 0:
            tl.store(state + checkpoint * state_stride + inner, kept)
            if HEADS == 2:
                tl.store(state + checkpoint * state_stride + next_head + inner, second)
    if target >= 0 and first_chunk < end_chunk:
        tl.store(state + target * state_stride + inner, kept)
        if HEADS == 2:
            tl.store(state + target * state_stride + next_head + inner, second)

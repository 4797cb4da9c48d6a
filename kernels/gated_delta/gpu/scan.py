"""Computes the states from chunk to chunk, and outputs. A program has some value dimensions of one head.

    read     = e^G k S            with the state S before the chunk
    changes  = mixing (v - read)
    out      = e^G q S + attention changes
    S        = e^G_last S + (e^(G_last - G) k)^T changes

Everything is transposed, value dimensions first, so that each product's result is the next one's left operand without
leaving registers. Only operands from global memory go through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .gates import load_dims, load_known_dims, store_dims
from .intra import FACTORS, KEEP, READ_KEY, READ_QUERY, WRITE_KEY


@triton.jit(do_not_specialize=["first_seq"])
def scan_chunks(
    q,  # one decay per head: [T, NUM_HEADS / GROUP, KEY_DIM], tokens q_stride apart; per dimension: see intra_per_dim
    k,
    write_keys,  # None, or like k: the keys that are multiplied by the changes
    v,  # [T, NUM_HEADS, VALUE_DIM], tokens v_stride apart
    mixing,  # [num_chunks, NUM_HEADS, 2, CHUNK, CHUNK]: these and the next
    attention,
    factors,  # [num_chunks, NUM_HEADS, FACTORS, CHUNK], or decay factors of states [num_chunks, NUM_HEADS, KEY_DIM]
    state,  # [slots, NUM_HEADS, KEY_DIM, VALUE_DIM] float32, slots state_stride apart
    sources,
    targets,
    chunk_start,
    checkpoints,
    seq_chunks,
    out,  # [T, NUM_HEADS, VALUE_DIM], tokens out_stride apart
    first_seq,
    q_stride,
    k_stride,
    v_stride,
    state_stride,
    out_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # per program; divides VALUE_DIM
    CHUNK: tl.constexpr,
    PER_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pdl.let_next_start()
    seq = tl.program_id(2)
    head = tl.program_id(1)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    row = tl.arange(0, CHUNK)
    dim = tl.arange(0, KEYS)[None, :]
    first_chunk = tl.load(seq_chunks + first_seq + seq)
    end_chunk = tl.load(seq_chunks + first_seq + seq + 1)
    source = tl.load(sources + first_seq + seq).to(tl.int64)
    target = tl.load(targets + first_seq + seq).to(tl.int64)
    begin = tl.load(chunk_start + first_chunk)
    inner = head * KEY_DIM * VALUE_DIM + dim.to(tl.int64) * VALUE_DIM + value.to(tl.int64)[:, None]
    tile = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    pdl.wait_for_previous()
    from_arena = source >= 0 and first_chunk < end_chunk
    kept = tl.zeros([VALUES, KEYS], tl.float32)
    if from_arena:
        kept = load_dims(state + source * state_stride + inner, dim, KEY_DIM, KEYS)
    for chunk in range(first_chunk, end_chunk):
        end = tl.load(chunk_start + chunk + 1)
        known = (row < end - begin)[:, None]
        token = (begin.to(tl.int64) + row)[:, None]
        place = tl.cast(chunk, tl.int64) * NUM_HEADS + head
        if PER_DIM:
            key_cells = place * CHUNK * KEY_DIM + row[:, None] * KEY_DIM + dim
            keys = load_dims(k + key_cells, dim, KEY_DIM, KEYS)
            queries = load_dims(q + key_cells, dim, KEY_DIM, KEYS)
            writers = load_dims(write_keys + key_cells, dim, KEY_DIM, KEYS)
            keep = load_dims(factors + place * KEY_DIM + dim, dim, KEY_DIM, KEYS)
        else:
            key_cells = head // GROUP * KEY_DIM + dim
            keys = load_known_dims(k + token * k_stride + key_cells, known, dim, KEY_DIM, KEYS)
            queries = load_known_dims(q + token * q_stride + key_cells, known, dim, KEY_DIM, KEYS)
            vectors = factors + place * FACTORS * CHUNK + row
            read_key = tl.load(vectors + READ_KEY * CHUNK)[None, :]
            read_query = tl.load(vectors + READ_QUERY * CHUNK)[None, :]
            write_key = tl.load(vectors + WRITE_KEY * CHUNK)[None, :]
            keep = tl.load(factors + (place * FACTORS + KEEP) * CHUNK)
        values = tl.load(v + token * v_stride + head * VALUE_DIM + value[None, :], mask=known, other=0.0)
        solved = tl.load(mixing + place * 2 * CHUNK * CHUNK + tile)
        weights = tl.load(attention + place * 2 * CHUNK * CHUNK + tile)

        rounded = kept.to(keys.dtype)
        read = tl.dot(rounded, tl.trans(keys), input_precision=PRECISION)
        result = tl.dot(rounded, tl.trans(queries), input_precision=PRECISION)
        if not PER_DIM:
            read *= read_key
            result *= read_query
        error = tl.trans(values).to(tl.float32) - read
        changes = tl.dot(error.to(keys.dtype), tl.trans(solved), input_precision=PRECISION)
        result = tl.dot(changes.to(keys.dtype), tl.trans(weights), result, input_precision=PRECISION)
        if PER_DIM:
            kept = tl.dot(changes.to(keys.dtype), writers, kept * keep, input_precision=PRECISION)
        else:
            kept = tl.dot((changes * write_key).to(keys.dtype), keys, kept * keep, input_precision=PRECISION)
        cells = out + token * out_stride + head * VALUE_DIM + value[None, :]
        tl.store(cells, tl.trans(result).to(out.dtype.element_ty), mask=known)
        checkpoint = tl.load(checkpoints + chunk).to(tl.int64)
        if checkpoint >= 0:
            store_dims(state + checkpoint * state_stride + inner, kept, dim, KEY_DIM, KEYS)
        begin = end
    if target >= 0 and first_chunk < end_chunk:
        store_dims(state + target * state_stride + inner, kept, dim, KEY_DIM, KEYS)

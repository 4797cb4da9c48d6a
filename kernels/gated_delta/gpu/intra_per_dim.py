"""The part of each chunk's work that needs no state, for one decay per key dimension.

    A[i, j] = beta_i sum_d k_id k_jd e^(G_id - G_jd)   j < i       attention: the same with q_i, no beta, and j <= i

e^(G_i - G_j) cannot be split into e^(G_i) and e^(-G_j), since the latter may overflow. Relative to a token m between i
and j it can: e^(G_i - G_m) and e^(G_m - G_j) are both at most 1. So the triangle is divided recursively, with m in the
middle of each block:

    0  .            a block of 2 h tokens: rows of its second half, columns of its first, relative to token h
    2  0  .         h = CHUNK / 2, ... 2, 1: each level is one product over the whole chunk; only its cells within the
    1  1  0  .      same block are used
    1  1  2  0

Keys and queries for products with states are stored scaled: read = e^G k, queries = scale e^G q,
write = e^(G_last - G) k.

A program takes DIMS key dimensions at a time, whose products add up. It stores their G, so that each level can load
the rows of its middles: in the memory of `mixing` and `attention`, which are only known at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .gates import exp2_to_1, load_dims, load_known_dims, log2_decay, reciprocal_length, store_dims, write_strength
from .intra import unit_lower_inverse


@triton.jit
def intra_chunk_per_dim(
    q,  # [T, NUM_HEADS / GROUP, KEY_DIM], tokens q_stride apart
    k,
    decay,  # [T, NUM_HEADS, KEY_DIM], tokens decay_stride apart
    beta,  # [T, NUM_HEADS]
    log_rate,  # [NUM_HEADS] float32 or None
    bias,  # [NUM_HEADS, KEY_DIM] float32 or None
    chunk_start,  # [num_chunks + 1]
    mixing,  # [num_chunks, NUM_HEADS, 2, CHUNK, CHUNK]: these and the next
    attention,
    totals,  # [num_chunks, NUM_HEADS, CHUNK, DIMS] float32, in the memory of `mixing` and `attention`, written last
    read_keys,  # [num_chunks, NUM_HEADS, CHUNK, KEY_DIM]
    read_queries,
    write_keys,
    keep,  # [num_chunks, NUM_HEADS, KEY_DIM] float32: decay factors of a state over the chunk
    q_stride,
    k_stride,
    decay_stride,
    beta_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    DIMS: tl.constexpr,  # key dimensions at a time, so that registers suffice for two programs; divides KEYS
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # CHUNK is 2 ** LEVELS
    SOLVE: tl.constexpr,
    NORM: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pdl.let_next_start()
    chunk = tl.program_id(1)
    head = tl.program_id(0)
    first = tl.load(chunk_start + chunk)
    count = tl.load(chunk_start + chunk + 1) - first
    row = tl.arange(0, CHUNK)
    known = row < count
    token = first.to(tl.int64) + row
    rate = None
    if log_rate is not None:
        rate = tl.exp(tl.load(log_rate + head))
    pdl.wait_for_previous()
    if count == 0:
        return
    dtype: tl.constexpr = read_keys.dtype.element_ty
    exists = known[:, None]
    key_cells = k + token[:, None] * k_stride + head // GROUP * KEY_DIM
    query_cells = q + token[:, None] * q_stride + head // GROUP * KEY_DIM
    gate_cells = decay + token[:, None] * decay_stride + head * KEY_DIM
    key_squares, query_squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    diagonal = tl.zeros([CHUNK], tl.float32)
    for part in tl.static_range(KEYS // DIMS):
        dim = part * DIMS + tl.arange(0, DIMS)[None, :]
        keys = load_known_dims(key_cells + dim, exists, dim, KEY_DIM, KEYS).to(tl.float32)
        queries = load_known_dims(query_cells + dim, exists, dim, KEY_DIM, KEYS).to(tl.float32)
        key_squares += tl.sum(keys * keys, axis=1)
        query_squares += tl.sum(queries * queries, axis=1)
        diagonal += tl.sum(queries * keys, axis=1)
    key_rows = reciprocal_length(key_squares, eps, NORM)
    query_rows = reciprocal_length(query_squares, eps, NORM) * scale
    strength = write_strength(tl.load(beta + token * beta_stride + head, mask=known, other=0.0), rate, BETA_SCALE)
    strength = tl.where(known, strength, 0.0)

    place = chunk.to(tl.int64) * NUM_HEADS + head
    own_totals = totals + place * (2 * CHUNK * CHUNK * dtype.primitive_bitwidth // 32)
    until = tl.where(row[:, None] >= row[None, :], 1.0, 0.0)
    # The highest bit in which two tokens' numbers differ tells the level at which they are on both sides of a middle.
    apart = tl.where(row[:, None] > row[None, :], row[:, None] ^ row[None, :], 0)
    dependence = tl.zeros([CHUNK, CHUNK], tl.float32)
    weights = tl.where(row[:, None] == row[None, :], (diagonal * key_rows * query_rows)[:, None], 0.0)
    for part in range(KEYS // DIMS):
        column = tl.arange(0, DIMS)[None, :]
        dim = part * DIMS + column
        offset = None
        if log_rate is not None:
            offset = load_dims(bias + head * KEY_DIM + dim, dim, KEY_DIM, KEYS)
        log_kept = log2_decay(load_known_dims(gate_cells + dim, exists, dim, KEY_DIM, KEYS), rate, offset)
        log_kept = tl.where(exists, log_kept, 0.0)
        cells_of_totals = own_totals + row[:, None] * DIMS + column
        tl.debug_barrier()  # all warps have read the totals of the part before
        # Sums by a product: a scan over rows would exchange values between all warps.
        coarse = (log_kept.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # exact in TF32
        total = tl.dot(until, log_kept - coarse, input_precision="tf32")
        tl.store(cells_of_totals, tl.dot(until, coarse, total, input_precision="tf32"))
        tl.debug_barrier()  # each warp reads what others wrote
        total = tl.load(cells_of_totals)
        last = tl.load(own_totals + (CHUNK - 1) * DIMS + column)
        keys = load_known_dims(key_cells + dim, exists, dim, KEY_DIM, KEYS).to(tl.float32) * key_rows[:, None]
        queries = load_known_dims(query_cells + dim, exists, dim, KEY_DIM, KEYS).to(tl.float32) * query_rows[:, None]

        wide = place * CHUNK * KEY_DIM + row[:, None] * KEY_DIM + dim
        since_start = exp2_to_1(total)
        store_dims(read_keys + wide, (keys * since_start).to(dtype), dim, KEY_DIM, KEYS)
        store_dims(read_queries + wide, (queries * since_start).to(dtype), dim, KEY_DIM, KEYS)
        store_dims(write_keys + wide, (keys * exp2_to_1(last - total)).to(dtype), dim, KEY_DIM, KEYS)
        store_dims(keep + place * KEY_DIM + dim, exp2_to_1(last), dim, KEY_DIM, KEYS)

        for level in range(LEVELS):  # not unrolled: registers hold the operands of one level only
            half = CHUNK >> (level + 1)
            middle = (row & ~(2 * half - 1)) + half
            of_middle = tl.load(own_totals + middle[:, None] * DIMS + column)
            fade = exp2_to_1(-tl.abs(total - of_middle))  # G falls from token to token
            scaled_keys = (keys * fade).to(dtype)
            scaled_queries = (queries * fade).to(dtype)
            columns = tl.trans(scaled_keys)
            across = (apart & -half) == half
            dependence += tl.where(across, tl.dot(scaled_keys, columns, input_precision=PRECISION), 0.0)
            weights += tl.where(across, tl.dot(scaled_queries, columns, input_precision=PRECISION), 0.0)
    solved = unit_lower_inverse(dependence * strength[:, None], CHUNK, SOLVE, PRECISION) * strength[None, :]

    tl.debug_barrier()  # all warps have read the totals, which are overwritten
    squares = place * 2 * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]
    tl.store(mixing + squares, solved.to(mixing.dtype.element_ty))
    tl.store(attention + squares, weights.to(attention.dtype.element_ty))

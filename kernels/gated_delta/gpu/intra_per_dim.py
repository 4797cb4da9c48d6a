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
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .gates import load_dims, load_known_dims, log2_decay, reciprocal_length, store_dims, write_strength
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
    mixing,  # [num_chunks, NUM_HEADS, CHUNK, CHUNK]
    attention,
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
    dim = tl.arange(0, KEYS)[None, :]
    rate, offset = None, None
    if log_rate is not None:
        rate, offset = tl.exp(tl.load(log_rate + head)), load_dims(bias + head * KEY_DIM + dim, dim, KEY_DIM, KEYS)
    pdl.wait_for_previous()
    if count == 0:
        return
    cells = head // GROUP * KEY_DIM + dim
    dtype: tl.constexpr = read_keys.dtype.element_ty
    exists = known[:, None]
    keys = load_known_dims(k + token[:, None] * k_stride + cells, exists, dim, KEY_DIM, KEYS).to(tl.float32)
    queries = load_known_dims(q + token[:, None] * q_stride + cells, exists, dim, KEY_DIM, KEYS).to(tl.float32)
    keys *= reciprocal_length(tl.sum(keys * keys, axis=1), eps, NORM)[:, None]
    queries *= (reciprocal_length(tl.sum(queries * queries, axis=1), eps, NORM) * scale)[:, None]
    gate_cells = decay + token[:, None] * decay_stride + head * KEY_DIM + dim
    log_kept = log2_decay(load_known_dims(gate_cells, exists, dim, KEY_DIM, KEYS), rate, offset)
    log_kept = tl.where(exists, log_kept, 0.0)
    total = tl.cumsum(log_kept, axis=0)
    last = tl.sum(log_kept, axis=0)[None, :]

    place = chunk.to(tl.int64) * NUM_HEADS + head
    wide = place * CHUNK * KEY_DIM + row[:, None] * KEY_DIM + dim
    since_start = tl.exp2(total)
    store_dims(read_keys + wide, (keys * since_start).to(dtype), dim, KEY_DIM, KEYS)
    store_dims(read_queries + wide, (queries * since_start).to(dtype), dim, KEY_DIM, KEYS)
    store_dims(write_keys + wide, (keys * tl.exp2(last - total)).to(dtype), dim, KEY_DIM, KEYS)
    store_dims(keep + place * KEY_DIM + dim, tl.exp2(last), dim, KEY_DIM, KEYS)

    strength = write_strength(tl.load(beta + token * beta_stride + head, mask=known, other=0.0), rate, BETA_SCALE)
    strength = tl.where(known, strength, 0.0)

    dependence = tl.zeros([CHUNK, CHUNK], tl.float32)
    weights = tl.where(row[:, None] == row[None, :], tl.sum(queries * keys, axis=1)[:, None], 0.0)
    for level in range(LEVELS):  # not unrolled: registers hold the operands of one level only
        of_keys, of_queries = _across_middles(queries, keys, total, CHUNK >> (level + 1), CHUNK, KEYS, dtype, PRECISION)
        dependence += of_keys
        weights += of_queries
    solved = unit_lower_inverse(dependence * strength[:, None], CHUNK, SOLVE, PRECISION) * strength[None, :]

    squares = place * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]
    tl.store(mixing + squares, solved.to(mixing.dtype.element_ty))
    tl.store(attention + squares, weights.to(attention.dtype.element_ty))


@triton.jit
def _across_middles(
    queries, keys, total, half, CHUNK: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """Return the products of keys, and of queries, in the second half of each block of 2 * `half` tokens with keys in
    the first half: [CHUNK, CHUNK], zero elsewhere.
    """
    row = tl.arange(0, CHUNK)
    middle = (row & ~(2 * half - 1)) + half
    of_middle = tl.gather(total, tl.broadcast_to(middle[:, None], (CHUNK, KEYS)), axis=0)
    later = (row & half)[:, None] != 0
    apart = tl.exp2(tl.where(later, total - of_middle, of_middle - total))
    scaled_keys = keys * apart
    columns = tl.trans(tl.where(later, 0.0, scaled_keys).to(DTYPE))
    rows_of_keys = tl.where(later, scaled_keys, 0.0).to(DTYPE)
    rows_of_queries = tl.where(later, queries * apart, 0.0).to(DTYPE)
    same_block = middle[:, None] == middle[None, :]
    of_keys = tl.where(same_block, tl.dot(rows_of_keys, columns, input_precision=PRECISION), 0.0)
    of_queries = tl.where(same_block, tl.dot(rows_of_queries, columns, input_precision=PRECISION), 0.0)
    return of_keys, of_queries

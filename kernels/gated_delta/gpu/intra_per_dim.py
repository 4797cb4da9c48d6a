"""The part of each chunk's work that needs no state, for one decay per key dimension.

    A[i, j] = beta_i sum_d k_id k_jd e^(G_id - G_jd)   j < i       attention: the same with q_i, no beta, and j <= i

Each sum is a product of matrices, with rows k e^(G - R) and columns k e^(R - G), relative to some R_d between the first
and the last G_d. Either factor overflows where G falls far. R in the middle halves the exponents: so a chunk may keep
as little as 2^-208 of a state in each dimension (FARTHEST twice).

Otherwise R is the G of a token m, and only pairs i >= m > j are computed, for which both factors are at most 1. The
rest of the triangle is divided recursively, until R in the middle suffices for what is left:

    0  .            a block of 2 h tokens: rows of its second half, columns of its first, relative to token h
    2  0  .         h = CHUNK / 2, ..., each level is one product over the whole chunk; only its cells within the
    1  1  0  .      same block are used, or those of the whole triangles in the last level
    1  1  2  0

Decays of less than 2^-26 a token count as 2^-26 (LEAST_KEPT), so that blocks of eight tokens never need division. That
is less than the rounding error of a state in float32.

Keys and queries for products with states are stored scaled: read = e^G k, queries = scale e^G q,
write = e^(G_last - G) k.

A program takes DIMS key dimensions at a time, whose products add up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .gates import (
    exp2_approximate,
    load_dims,
    load_known_dims,
    log2_decay,
    reciprocal_length,
    store_dims,
    write_strength,
)
from .intra import unit_lower_inverse

LEAST_KEPT = tl.constexpr(-26.0)  # binary logarithms
FARTHEST = tl.constexpr(104.0)  # 4 tokens of LEAST_KEPT; factors times keys as small as 2^-22 are normal numbers
LEAST_HALF = tl.constexpr(4)


@triton.jit
def sums_of_rows(factors, x, dtype: tl.constexpr):
    """Return the product of factors [M, N], which are 0, 1 or -1, and x [N, D] float32, nearly as exact as float32.

    A scan over rows would exchange values between all warps.
    """
    if dtype == tl.bfloat16:
        coarse = x.to(tl.bfloat16)
        fine = (x - coarse.to(tl.float32)).to(tl.bfloat16)
        result = tl.dot(factors.to(tl.bfloat16), coarse, tl.dot(factors.to(tl.bfloat16), fine))
    else:
        coarse = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # exact in TF32
        result = tl.dot(factors, coarse, tl.dot(factors, x - coarse, input_precision="tf32"), input_precision="tf32")
    return result


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
    DIMS: tl.constexpr,  # key dimensions at a time; divides KEYS
    CHUNK: tl.constexpr,
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
    # factors have the range of float32, which float16 lacks
    operand: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float32
    exists = known[:, None]
    key_cells = k + token[:, None] * k_stride + head // GROUP * KEY_DIM
    query_cells = q + token[:, None] * q_stride + head // GROUP * KEY_DIM
    gate_cells = decay + token[:, None] * decay_stride + head * KEY_DIM
    key_squares, query_squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    if NORM:
        for part in range(KEYS // DIMS):
            dim = part * DIMS + tl.arange(0, DIMS)[None, :]
            keys = load_known_dims(key_cells + dim, exists, dim, KEY_DIM, KEYS).to(tl.float32)
            queries = load_known_dims(query_cells + dim, exists, dim, KEY_DIM, KEYS).to(tl.float32)
            key_squares += tl.sum(keys * keys, axis=1)
            query_squares += tl.sum(queries * queries, axis=1)
    key_rows = reciprocal_length(key_squares, eps, NORM)
    query_rows = reciprocal_length(query_squares, eps, NORM) * scale

    place = chunk.to(tl.int64) * NUM_HEADS + head
    dependence = tl.zeros([CHUNK, CHUNK], tl.float32)
    weights = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(KEYS // DIMS):
        dim = part * DIMS + tl.arange(0, DIMS)[None, :]
        offset = None
        if log_rate is not None:
            offset = load_dims(bias + head * KEY_DIM + dim, dim, KEY_DIM, KEYS)
        log_kept = log2_decay(load_known_dims(gate_cells + dim, exists, dim, KEY_DIM, KEYS), rate, offset)
        log_kept = tl.where(exists, tl.maximum(log_kept, LEAST_KEPT), 0.0)
        total = sums_of_rows(tl.where(row[:, None] >= row[None, :], 1.0, 0.0), log_kept, operand)
        last = tl.sum(tl.where(row[:, None] == CHUNK - 1, total, 0.0), axis=0)[None, :]
        keys = load_known_dims(key_cells + dim, exists, dim, KEY_DIM, KEYS).to(tl.float32) * key_rows[:, None]
        queries = load_known_dims(query_cells + dim, exists, dim, KEY_DIM, KEYS).to(tl.float32) * query_rows[:, None]

        wide = place * CHUNK * KEY_DIM + row[:, None] * KEY_DIM + dim
        since_start = exp2_approximate(total)
        store_dims(read_keys + wide, (keys * since_start).to(dtype), dim, KEY_DIM, KEYS)
        store_dims(read_queries + wide, (queries * since_start).to(dtype), dim, KEY_DIM, KEYS)
        store_dims(write_keys + wide, (keys * exp2_approximate(last - total)).to(dtype), dim, KEY_DIM, KEYS)
        store_dims(keep + place * KEY_DIM + dim, exp2_approximate(last), dim, KEY_DIM, KEYS)

        least = tl.min(last)
        if least >= -2 * FARTHEST:
            # Above the diagonal are large numbers, even infinite ones, until all parts have been added up.
            since = total - 0.5 * last
            columns = tl.trans((keys * exp2_approximate(-since)).to(operand))
            since = exp2_approximate(since)
            dependence = tl.dot((keys * since).to(operand), columns, dependence, input_precision=PRECISION)
            weights = tl.dot((queries * since).to(operand), columns, weights, input_precision=PRECISION)
        else:
            half = CHUNK // 2
            own = row + tl.where(least > 0.0, 1, 0)  # row: so that nothing is kept in registers from before the loop
            at, other = own[:, None], own[None, :]
            while half >= LEAST_HALF:
                middle = (at & (-2 * half)) + half
                signs = tl.where((other > middle) & (other <= at), 1.0, 0.0)
                signs = tl.where((other > at) & (other <= middle), -1.0, signs)
                since = sums_of_rows(signs, log_kept, operand)
                is_last = (tl.max(tl.abs(since)) <= FARTHEST) | (half == LEAST_HALF)
                columns = tl.trans((keys * exp2_approximate(-since)).to(operand))
                since = exp2_approximate(since)
                apart = tl.where(at >= other, at ^ other, CHUNK)  # less than 2 h: in one block of 2 h tokens
                is_part = (apart < 2 * half) & (apart >= tl.where(is_last, 0, half))
                products = tl.dot((keys * since).to(operand), columns, input_precision=PRECISION)
                dependence = tl.where(is_part, dependence + products, dependence)
                products = tl.dot((queries * since).to(operand), columns, input_precision=PRECISION)
                weights = tl.where(is_part, weights + products, weights)
                half = tl.where(is_last, 0, half // 2)
    # min(count, 0) is always 0, but the compiler does not know that, and keeps no addresses in registers from before.
    row += tl.minimum(count, 0)
    known = row < count
    betas = beta + (first.to(tl.int64) + row) * beta_stride + head
    strength = write_strength(tl.load(betas, mask=known, other=0.0), rate, BETA_SCALE)
    strength = tl.where(known, strength, 0.0)
    dependence = tl.where(row[:, None] > row[None, :], dependence * strength[:, None], 0.0)
    weights = tl.where(row[:, None] >= row[None, :], weights, 0.0)
    squares = place * 2 * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]
    tl.store(attention + squares, weights.to(attention.dtype.element_ty))
    solved = unit_lower_inverse(dependence, CHUNK, SOLVE, PRECISION) * strength[None, :]
    tl.store(mixing + squares, solved.to(mixing.dtype.element_ty))

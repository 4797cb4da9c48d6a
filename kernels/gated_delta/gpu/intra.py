"""The part of each chunk's work that needs no state, for one decay per head. All chunks are computed in parallel.

    A[i, j] = beta_i (k_i . k_j) e^(G_i - G_j)   j < i             G: the sum of g up to and including a token
    mixing = (I + A)^-1 diag(beta)                                 changes = mixing (v - e^G k S)
    attention[i, j] = scale (q_i . k_j) e^(G_i - G_j)   j <= i     out = scale e^G q S + attention changes

Keys and queries are multiplied without being normalized. Afterwards their lengths are divided out: here for the two
matrices, and in each token's factors for the products that the scan computes.

The inverse of I + A is computed in the registers of one program (`unit_lower_inverse`):

    blocks on the diagonal, B x B       forward substitution, all of them at once: B - 1 steps of rank 1
    the rest, below them                I + A = D^-1 (I + M), M = D N            D: the blocks' inverses, N: the rest
                                        (I + M)^-1 = (I - M) (I + M^2) (I + M^4), since M^8 = 0 for eight blocks

Substitution is as accurate as the matrix allows, and the series has few terms, so that values do not grow as they would
in a series over all of A. Products use the tensor cores (TF32).
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .gates import load_known_dims, log2_decay, reciprocal_length, write_strength

FACTORS = tl.constexpr(4)  # vectors of a chunk and head:
READ_KEY, READ_QUERY, WRITE_KEY, KEEP = (tl.constexpr(number) for number in range(4))


@triton.jit
def unit_lower_inverse(a, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + a)^-1 for a [SIZE, SIZE], zero on and above its diagonal; SIZE is 1, 2, 4 or 8 times BLOCK."""
    blocks: tl.constexpr = SIZE // BLOCK
    block = tl.arange(0, blocks)
    same_block = block[:, None, None, None] == block[None, None, :, None]
    cells = tl.reshape(a, (blocks, BLOCK, blocks, BLOCK))
    diagonal = tl.sum(tl.where(same_block, cells, 0.0), axis=2)
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.where((row == column) & (block[:, None, None] >= 0), 1.0, 0.0)
    for step in tl.static_range(BLOCK - 1):
        factors = tl.sum(tl.where(column == step, diagonal, 0.0), axis=2, keep_dims=True)
        done = tl.sum(tl.where(row == step, inverse, 0.0), axis=1, keep_dims=True)
        inverse -= factors * done
    spread = tl.where(same_block, inverse[:, :, None, :], 0.0)
    result = tl.reshape(spread, (SIZE, SIZE))
    if blocks > 1:
        at = tl.arange(0, SIZE) // BLOCK
        below = tl.where(at[:, None] > at[None, :], a, 0.0)
        chained = tl.dot(result, below, input_precision=PRECISION)
        if blocks > 2:
            squared = tl.dot(chained, chained, input_precision=PRECISION)
            if blocks > 4:
                fourth = tl.dot(squared, squared, input_precision=PRECISION)
                result = tl.dot(fourth, result, result, input_precision=PRECISION)
            result = tl.dot(squared, result, result, input_precision=PRECISION)
        result -= tl.dot(chained, result, input_precision=PRECISION)
    return result


@triton.jit
def intra_chunk(
    q,  # [T, NUM_HEADS / GROUP, KEY_DIM], tokens q_stride apart
    k,
    decay,  # [T, NUM_HEADS], tokens decay_stride apart
    beta,
    log_rate,  # [NUM_HEADS] float32 or None
    bias,
    chunk_start,  # [num_chunks + 1]
    mixing,  # [num_chunks, NUM_HEADS, 2, CHUNK, CHUNK]: these and the next
    attention,
    factors,  # [num_chunks, NUM_HEADS, FACTORS, CHUNK] float32
    q_stride,
    k_stride,
    decay_stride,
    beta_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # value heads that share a key head
    HEADS: tl.constexpr,  # per program; divides GROUP
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    CHUNK: tl.constexpr,
    SOLVE: tl.constexpr,  # size B of the blocks that are inverted by substitution
    NORM: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,  # precision of float32 products
):
    pdl.let_next_start()
    chunk = tl.program_id(1)
    first_head = tl.program_id(0) * HEADS
    first = tl.load(chunk_start + chunk)
    count = tl.load(chunk_start + chunk + 1) - first
    row = tl.arange(0, CHUNK)
    known = row < count
    token = first.to(tl.int64) + row
    dim = tl.arange(0, KEYS)[None, :]
    cells = first_head // GROUP * KEY_DIM + dim
    pdl.wait_for_previous()
    if count == 0:
        return
    keys = load_known_dims(k + token[:, None] * k_stride + cells, known[:, None], dim, KEY_DIM, KEYS)
    queries = load_known_dims(q + token[:, None] * q_stride + cells, known[:, None], dim, KEY_DIM, KEYS)
    key_products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    query_products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    on_diagonal = row[:, None] == row[None, :]
    key_squares = tl.where(on_diagonal, key_products, 0.0)
    key_rows = reciprocal_length(tl.sum(key_squares, axis=1), eps, NORM)
    key_columns = reciprocal_length(tl.sum(key_squares, axis=0), eps, NORM)
    wide = queries.to(tl.float32)
    query_rows = reciprocal_length(tl.sum(wide * wide, axis=1), eps, NORM) * scale
    key_products *= key_rows[:, None] * key_columns[None, :]
    query_products *= query_rows[:, None] * key_columns[None, :]
    for index in tl.static_range(HEADS):
        head = first_head + index
        rate, offset = None, None
        if log_rate is not None:
            rate, offset = tl.exp(tl.load(log_rate + head)), tl.load(bias + head)
        gates = tl.load(decay + token * decay_stride + head, mask=known, other=0.0)
        log_kept = tl.where(known, log2_decay(gates, rate, offset), 0.0)
        strength = write_strength(tl.load(beta + token * beta_stride + head, mask=known, other=0.0), rate, BETA_SCALE)
        strength = tl.where(known, strength, 0.0)
        total = tl.cumsum(log_kept, axis=0)
        last = tl.sum(log_kept, axis=0)
        at_or_below = row[:, None] >= row[None, :]
        kept = tl.where(at_or_below, tl.exp2(tl.where(at_or_below, total[:, None] - total[None, :], 0.0)), 0.0)
        dependence = tl.where(on_diagonal, 0.0, key_products * kept * strength[:, None])
        solved = unit_lower_inverse(dependence, CHUNK, SOLVE, PRECISION) * strength[None, :]
        place = chunk.to(tl.int64) * NUM_HEADS + head
        squares = place * 2 * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]
        tl.store(mixing + squares, solved.to(mixing.dtype.element_ty))
        tl.store(attention + squares, (query_products * kept).to(attention.dtype.element_ty))
        vectors = factors + place * FACTORS * CHUNK + row
        since_start = tl.exp2(total)
        tl.store(vectors + READ_KEY * CHUNK, since_start * key_rows)
        tl.store(vectors + READ_QUERY * CHUNK, since_start * query_rows)
        tl.store(vectors + WRITE_KEY * CHUNK, tl.exp2(last - total) * key_rows)
        tl.store(vectors + KEEP * CHUNK, tl.zeros([CHUNK], tl.float32) + tl.exp2(last))

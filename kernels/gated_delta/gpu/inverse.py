"""The inverse of I + A for a strictly lower triangular A, in the registers of one program.

    blocks on the diagonal, B x B       forward substitution, all of them at once: B - 1 steps of rank 1
    what lies below                     I + A = D^-1 (I + M), M = D N            D: their inverses, N: A below them
                                        (I + M)^-1 = (I - M) (I + M^2) (I + M^4), since M^8 = 0 for eight blocks

Substitution is as accurate as the matrix allows, and the series has few terms: nothing grows as it would in a series
over all of A. Products take the tensor cores (TF32).
"""

from __future__ import annotations

import triton
import triton.language as tl


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

"""Products of a few tokens with one matrix a head (GEMV): bound by reading the matrices.

A program loads its piece of one head's matrix into registers before the previous kernel has ended, and multiplies one
token after another.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous

MOST_TOKENS = 2  # with more, a matrix product is faster
ELEMENTS = 8192  # elements of a matrix in one program


def multiply_heads(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """Compute out [T, H, N] = x [T, H, K] matrices [H, N, K]^T for each head; `matrices` may be strided."""
    num_tokens, num_heads, depth = x.shape
    columns = out.shape[2]
    block = max(1, min(columns, ELEMENTS // triton.next_power_of_2(depth)))
    _multiply[(triton.cdiv(columns, block), num_heads)](
        x,
        matrices,
        out,
        num_tokens,
        x.stride(0),
        x.stride(1),
        matrices.stride(0),
        matrices.stride(1),
        matrices.stride(2),
        out.stride(0),
        out.stride(1),
        DEPTH=depth,
        PADDED_DEPTH=triton.next_power_of_2(depth),
        COLUMNS=columns,
        BLOCK=block,
        num_warps=4,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply(
    x_ptr,
    matrices_ptr,
    out_ptr,
    num_tokens,
    x_token_stride,
    x_head_stride,
    head_stride,
    column_stride,
    depth_stride,
    out_token_stride,
    out_head_stride,
    DEPTH: tl.constexpr,
    PADDED_DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, PADDED_DEPTH)
    let_next_start()
    place = head.to(tl.int64) * head_stride + column[:, None] * column_stride + depth[None, :] * depth_stride
    matrix = tl.load(matrices_ptr + place, mask=(column < COLUMNS)[:, None] & (depth < DEPTH)[None, :], other=0.0)
    wait_for_previous()
    for token in range(num_tokens):
        x = tl.load(x_ptr + token * x_token_stride + head * x_head_stride + depth, mask=depth < DEPTH, other=0.0)
        product = tl.sum(matrix.to(tl.float32) * x[None, :].to(tl.float32), 1)
        tl.store(out_ptr + token * out_token_stride + head * out_head_stride + column, product, mask=column < COLUMNS)

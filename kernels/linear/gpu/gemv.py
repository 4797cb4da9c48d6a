"""Linear layers for 1 to 4 tokens (GEMV): many small programs stream the weight through registers.

    program p           ROWS whole rows of the weight, so that no sums cross programs
    a thread            8 consecutive weights of every row at a time, times those values of each token; one sum per row

With so few tokens, the time is spent on reading the weight and, in small models, on launches. So the kernel fuses the
norm before the product, and the bias, gate and residual after it; it prefetches its weights before it waits for the
previous kernel, which writes its input; and it leaves no partial sums to another kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl
from baton.kernels.activation import Activation, Pointwise
from baton.kernels.activation.gpu import activated

MAX_TOKENS = 4
THREAD = 8  # weights that a thread loads at once: 16 bytes of bfloat16


def stream_weight(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None,
    norm: Tensor | None,
    eps: float,
    activation: Activation | Pointwise | None,
    add: bool,
    BLOCK_N: int,
    BLOCK_K: int,
    PRELOAD: int,
    PREFETCH: int,
    num_warps: int,
) -> None:
    """Compute out [T, N] = norm(x) [T, K] @ weight.T + bias, for T <= MAX_TOKENS. With `add`, add it to `out`.

    With an `Activation`, weight [2 N, K] has gates, then ups, and out = activation(gate) * up. A program computes
    BLOCK_N columns of out, in steps of BLOCK_K, which divides K. Before it waits for its input, it loads the weights of
    the first PRELOAD steps, and prefetches the others with PREFETCH.
    """
    num_tokens, depth = x.shape
    columns = out.shape[1]
    gemv_kernel[(triton.cdiv(columns, BLOCK_N),)](
        x,
        weight,
        norm,
        bias,
        out,
        num_tokens,
        x.stride(0),
        out.stride(0),
        eps,
        COLUMNS=columns,
        DEPTH=depth,
        TOKENS=triton.next_power_of_2(num_tokens),
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        PRELOAD=min(PRELOAD, depth // BLOCK_K),
        PREFETCH=bool(PREFETCH),
        THREAD=THREAD,
        ACTIVATION=None if activation is None else activation.value,
        GATED=isinstance(activation, Activation),
        ADD=add,
        num_warps=num_warps,
        **pdl.launch_options(),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def gemv_kernel(
    x,  # [num_tokens, DEPTH], rows x_stride apart
    weight,  # [COLUMNS, DEPTH]; GATED: [2 * COLUMNS, DEPTH]
    norm,  # [DEPTH] or None
    bias,  # like weight's rows, or None
    out,  # [num_tokens, COLUMNS], rows out_stride apart
    num_tokens,
    x_stride,
    out_stride,
    eps,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,  # num_tokens, rounded up to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRELOAD: tl.constexpr,
    PREFETCH: tl.constexpr,
    THREAD: tl.constexpr,
    ACTIVATION: tl.constexpr,  # or None
    GATED: tl.constexpr,  # whether ACTIVATION is for gates: the weight then has gates and ups
    ADD: tl.constexpr,
):
    pdl.let_next_start()
    PARTS: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = PARTS * BLOCK_N
    STEPS: tl.constexpr = DEPTH // BLOCK_K
    index = tl.arange(0, ROWS)
    column = tl.minimum(tl.program_id(0) * BLOCK_N + index // PARTS, COLUMNS - 1)
    row = (column + index % PARTS * COLUMNS).to(tl.int64)  # gate, up, gate, up, ... of consecutive columns
    cells = weight + row[:, None] * DEPTH + tl.arange(0, BLOCK_K)[None, :]

    if PREFETCH and STEPS > PRELOAD:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        lines = tl.arange(0, BLOCK_K // LINE)[None, :] * LINE
        for step in tl.static_range(PRELOAD, STEPS):
            pdl.prefetch(weight + row[:, None] * DEPTH + step * BLOCK_K + lines)
    loaded = ()
    for step in tl.static_range(PRELOAD):
        loaded = loaded + (tl.load(cells + step * BLOCK_K),)
    pdl.wait_for_previous()

    sums = ()
    squares = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros((ROWS, BLOCK_K // THREAD), tl.float32),)
        squares = squares + (tl.zeros((BLOCK_K,), tl.float32),)
    for step in tl.static_range(PRELOAD):
        sums, squares = _add_step(
            sums, squares, loaded[step], x, norm, step * BLOCK_K, num_tokens, x_stride, TOKENS, BLOCK_K, THREAD
        )
    for step in tl.range(PRELOAD, STEPS):
        tile = tl.load(cells + step * BLOCK_K)
        sums, squares = _add_step(
            sums, squares, tile, x, norm, step * BLOCK_K, num_tokens, x_stride, TOKENS, BLOCK_K, THREAD
        )

    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    for token in tl.static_range(TOKENS):
        if token < num_tokens:
            result = tl.sum(sums[token], axis=1)
            if norm is not None:
                result *= tl.rsqrt(tl.sum(squares[token], axis=0) / DEPTH + eps)
            if bias is not None:
                result += tl.load(bias + row).to(tl.float32)
            if GATED:
                gate, up = tl.split(tl.reshape(result, (BLOCK_N, 2)))
                result = activated(gate, ACTIVATION) * up
            elif ACTIVATION is not None:
                result = activated(result, ACTIVATION)
            target = out + token * out_stride + columns
            if ADD:
                result += tl.load(target, mask=columns < COLUMNS, other=0.0).to(tl.float32)
            tl.store(target, result.to(out.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def _add_step(
    sums,
    squares,
    tile,
    x,
    norm,
    start,
    num_tokens,
    x_stride,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    THREAD: tl.constexpr,
):
    """Add the products of tile [ROWS, BLOCK_K] with each token to the sums, and x's squares, from depth `start` on.

    The norm's factor is the same for the whole row of x, so it is applied at the end; here x is only multiplied by the
    norm's weights.
    """
    depth = start + tl.arange(0, BLOCK_K)
    weights = tile.to(tl.float32)
    new_sums = ()
    new_squares = ()
    for token in tl.static_range(TOKENS):
        values = tl.load(x + tl.minimum(token, num_tokens - 1) * x_stride + depth).to(tl.float32)
        square = squares[token]
        if norm is not None:
            square += values * values
            values *= tl.load(norm + depth).to(tl.float32)
        products = tl.reshape(weights * values[None, :], (tile.shape[0], BLOCK_K // THREAD, THREAD))
        new_sums = new_sums + (sums[token] + tl.sum(products, axis=2),)
        new_squares = new_squares + (square,)
    return new_sums, new_squares

"""Linear layers for tens of tokens on the tensor cores, with split-K.

out.T = weight @ x.T is computed, so that the weight has the long side of the tensor cores' tiles.

    program (n, s, t)   BLOCK_N columns of out, part s of SPLIT of the depth, TOKENS tokens from t * TOKENS on

If the depth is split, each program stores its part in a workspace. The last program of a tile to arrive adds the parts
in order, so that the result is deterministic.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl
from baton.kernels.activation import Activation, Pointwise
from baton.kernels.activation.gpu import activated
from baton.kernels.arrivals import is_last_to_arrive

MAX_TILES = 1 << 16  # most tiles of a launch with split depth


def multiply_tiles(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None,
    activation: Activation | Pointwise | None,
    add: bool,
    TOKENS: int,
    BLOCK_N: int,
    BLOCK_K: int,
    SPLIT: int,
    PREFETCH: int,
    num_warps: int,
    num_stages: int,
) -> None:
    """Compute out [T, N] = x [T, K] @ weight.T + bias; `activation` and `add` as in `stream_weight`.

    SPLIT * BLOCK_K must divide K. Launches with SPLIT > 1 must not run concurrently on a device: they share the arrival
    counters.
    """
    num_tokens, depth = x.shape
    columns = out.shape[1]
    grid = (triton.cdiv(columns, BLOCK_N), SPLIT, triton.cdiv(num_tokens, TOKENS))
    parts = arrived = None
    if SPLIT > 1:
        assert grid[0] * grid[2] <= MAX_TILES, "so many tiles keep a device busy without a split"
        rows = (2 if isinstance(activation, Activation) else 1) * BLOCK_N
        parts = torch.empty(grid[0] * grid[2] * SPLIT * rows * TOKENS, dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device)
    gemm_kernel[grid](
        x,
        weight,
        bias,
        out,
        parts,
        arrived,
        num_tokens,
        x.stride(0),
        out.stride(0),
        COLUMNS=columns,
        DEPTH=depth,
        TOKENS=TOKENS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        SPLIT=SPLIT,
        PREFETCH=min(PREFETCH, depth // SPLIT // BLOCK_K),
        ACTIVATION=None if activation is None else activation.value,
        GATED=isinstance(activation, Activation),
        ADD=add,
        num_warps=num_warps,
        num_stages=num_stages,
        **pdl.launch_options(),
    )


@functools.cache
def _arrived(device: torch.device) -> Tensor:
    """Return the arrival counters of split tiles. They are zero between launches: a tile's last program resets it."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_tokens"])
def gemm_kernel(
    x,  # [num_tokens, DEPTH], rows x_stride apart
    weight,  # [COLUMNS, DEPTH]; GATED: [2 * COLUMNS, DEPTH]
    bias,  # like weight's rows, or None
    out,  # [num_tokens, COLUMNS], rows out_stride apart
    parts,  # float32 [tiles, SPLIT, ROWS, TOKENS], or None
    arrived,  # int32 [tiles]
    num_tokens,
    x_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PREFETCH: tl.constexpr,
    ACTIVATION: tl.constexpr,  # or None
    GATED: tl.constexpr,  # whether ACTIVATION is for gates: the weight then has gates and ups
    ADD: tl.constexpr,
):
    pdl.let_next_start()
    PARTS: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = PARTS * BLOCK_N
    PART_DEPTH: tl.constexpr = DEPTH // SPLIT
    index = tl.arange(0, ROWS)
    column = tl.minimum(tl.program_id(0) * BLOCK_N + index // PARTS, COLUMNS - 1)
    row = (column + index % PARTS * COLUMNS).to(tl.int64)  # gate, up, gate, up, ... of consecutive columns
    start = tl.program_id(1) * PART_DEPTH
    if PREFETCH:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        lines = start + tl.arange(0, BLOCK_K // LINE)[None, :] * LINE
        for step in tl.static_range(PREFETCH):
            pdl.prefetch(weight + row[:, None] * DEPTH + step * BLOCK_K + lines)
    pdl.wait_for_previous()

    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    depth = start + tl.arange(0, BLOCK_K)
    weights = weight + row[:, None] * DEPTH + depth[None, :]
    inputs = x + token.to(tl.int64)[:, None] * x_stride + depth[None, :]
    known = (token < num_tokens)[:, None]
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for _ in tl.range(PART_DEPTH // BLOCK_K):
        total = tl.dot(tl.load(weights), tl.load(inputs, mask=known, other=0.0).T, total)
        weights += BLOCK_K
        inputs += BLOCK_K

    if SPLIT == 1:
        _finish(total, bias, row, out, num_tokens, out_stride, COLUMNS, TOKENS, BLOCK_N, ACTIVATION, GATED, ADD)
    else:
        tile = tl.program_id(0) + tl.num_programs(0) * tl.program_id(2)
        cells = index[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        place = parts + tile.to(tl.int64) * (SPLIT * ROWS * TOKENS)
        tl.store(place + tl.program_id(1) * (ROWS * TOKENS) + cells, total)
        if is_last_to_arrive(arrived + tile, SPLIT - 1):
            total = tl.zeros((ROWS, TOKENS), tl.float32)
            for part in tl.static_range(SPLIT):
                total += tl.load(place + part * (ROWS * TOKENS) + cells, cache_modifier=".cg")
            _finish(total, bias, row, out, num_tokens, out_stride, COLUMNS, TOKENS, BLOCK_N, ACTIVATION, GATED, ADD)


@triton.jit
def _finish(
    total,  # [ROWS, TOKENS]
    bias,
    row,  # [ROWS]: of the weight
    out,
    num_tokens,
    out_stride,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,  # or None
    GATED: tl.constexpr,  # whether ACTIVATION is for gates: the weight then has gates and ups
    ADD: tl.constexpr,
):
    """Apply bias, gate and residual, and write the result."""
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_N, 2, TOKENS)), (0, 2, 1)))
        total = activated(gate, ACTIVATION) * up
    elif ACTIVATION is not None:
        total = activated(total, ACTIVATION)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    targets = out + token.to(tl.int64)[:, None] * out_stride + columns[None, :]
    mask = (token < num_tokens)[:, None] & (columns < COLUMNS)[None, :]
    result = total.T
    if ADD:
        result += tl.load(targets, mask=mask, other=0.0).to(tl.float32)
    tl.store(targets, result.to(out.dtype.element_ty), mask=mask)

"""Experts of a few tokens: every (token, expert) pair reads its own weights, with all of the device at once.

    gate_up   program (pair, some columns)   silu(gate) * up                     [T, K, F]
    down      program (token, some columns)  the sum over the token's experts    [T, H]

Nothing is sorted and nothing is added up in a third kernel: what a token costs beyond reading its experts' weights once
is two launches, and the second hides most of its own by reading weights while the first still runs. Two tokens of one
expert read its weights twice, the second time mostly from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous

from .options import FewOptions


def fused_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    add_to: Tensor | None,
    options: FewOptions,
) -> Tensor:
    """See `baton.kernels.moe.fused_experts`."""
    num_tokens, top_k = expert_ids.shape
    _, hidden_size, width = down.shape
    activations = torch.empty((num_tokens, top_k, width), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if add_to is None else add_to
    _gate_up_few[(num_tokens * top_k, triton.cdiv(2 * width, options.gate_up_columns))](
        x,
        gate_up,
        expert_ids,
        activations,
        x.stride(0),
        COLUMNS=2 * width,
        DEPTH=hidden_size,
        TOP_K=top_k,
        BLOCK_COLUMNS=options.gate_up_columns,
        BLOCK_DEPTH=options.gate_up_depth,
        num_warps=options.gate_up_warps,
        **launch_options(),
    )
    _down_few[(num_tokens, triton.cdiv(hidden_size, options.down_columns))](
        activations,
        down,
        expert_ids,
        weights,
        out,
        out.stride(0),
        COLUMNS=hidden_size,
        DEPTH=width,
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        BLOCK_COLUMNS=options.down_columns,
        BLOCK_DEPTH=options.down_depth,
        ADD=add_to is not None,
        num_warps=options.down_warps,
        **launch_options(),
    )
    return out


@triton.jit
def _gate_up_few(
    x,  # [T, DEPTH]
    weight,  # [E, COLUMNS, DEPTH]
    expert_ids,  # [T * TOP_K]
    out,  # [T * TOP_K, COLUMNS / 2]
    x_stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    k = tl.arange(0, BLOCK_DEPTH)
    wait_for_previous()
    let_next_start()  # only now: `_down_few` reads what the kernels before this one wrote without waiting
    expert = tl.load(expert_ids + pair)
    if expert >= 0:
        row = x + (pair // TOP_K).to(tl.int64) * x_stride
        weight_rows = weight + expert.to(tl.int64) * (COLUMNS * DEPTH) + column[:, None] * DEPTH
        sums = tl.zeros([BLOCK_COLUMNS, BLOCK_DEPTH], tl.float32)
        for start in tl.static_range(0, DEPTH, BLOCK_DEPTH):
            inside = k < DEPTH - start
            read = tl.load(
                weight_rows + start + k[None, :], mask=(column < COLUMNS)[:, None] & inside[None, :], other=0.0
            )
            sums += read.to(tl.float32) * tl.load(row + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(tl.sum(sums, 1), [BLOCK_COLUMNS // 2, 2]))
        activation = gate / (1.0 + tl.exp(-gate)) * up
        half = tl.program_id(1) * (BLOCK_COLUMNS // 2) + tl.arange(0, BLOCK_COLUMNS // 2)
        to = out + pair.to(tl.int64) * (COLUMNS // 2) + half
        tl.store(to, activation.to(out.dtype.element_ty), mask=half < COLUMNS // 2)


@triton.jit
def _down_few(
    activations,  # [T, TOP_K, DEPTH]
    weight,  # [E, COLUMNS, DEPTH]
    expert_ids,  # [T, TOP_K]
    routing_weights,  # [T, TOP_K] float32
    out,  # [T, COLUMNS], rows out_stride apart
    out_stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,  # TOP_K, filled up to a power of two
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    ADD: tl.constexpr,
):
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    place, k = tl.arange(0, PLACES), tl.arange(0, BLOCK_DEPTH)
    pair = token * TOP_K + place
    # The kernel before let this one start when all before it had ended, so the routing is there; past the first cache,
    # which may hold what lay there earlier.
    expert = tl.load(expert_ids + pair, mask=place < TOP_K, other=-1, cache_modifier=".cg")
    routed = expert >= 0
    weight_rows = weight + expert.to(tl.int64)[:, None, None] * (COLUMNS * DEPTH) + column[None, :, None] * DEPTH
    readable = routed[:, None, None] & (column < COLUMNS)[None, :, None]
    loaded = ()
    for start in tl.static_range(0, DEPTH, BLOCK_DEPTH):
        inside = (k < DEPTH - start)[None, None, :]
        loaded = loaded + (tl.load(weight_rows + start + k[None, None, :], mask=readable & inside, other=0.0),)
    wait_for_previous()

    share = tl.load(routing_weights + pair, mask=routed, other=0.0)
    rows = (activations + pair * DEPTH)[:, None, None]
    sums = tl.zeros([PLACES, BLOCK_COLUMNS, BLOCK_DEPTH], tl.float32)
    for start in tl.static_range(0, DEPTH, BLOCK_DEPTH):
        inside = (k < DEPTH - start)[None, None, :]
        row = tl.load(rows + start + k[None, None, :], mask=routed[:, None, None] & inside, other=0.0)
        sums += loaded[start // BLOCK_DEPTH].to(tl.float32) * row.to(tl.float32)
    total = tl.sum(tl.sum(sums, 2) * share[:, None], 0)
    to = out + token * out_stride + column
    if ADD:
        total += tl.load(to, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=column < COLUMNS)

"""Experts for a few tokens (GEMV): every (token, expert) pair reads its expert's weights, with the whole device.

    gate_up   program (pair, some columns)   activation(gate, up)     [T, K, F]
    down      program (token, some columns)  the sum over the token's experts    [T, H]

Pairs are not sorted, and no third kernel adds them. Beside reading weights, a step costs two launches; the second
kernel hides most of its own by reading weights while the first still runs. Two tokens of one expert read its weights
twice, the second time mostly from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.launch import cdiv, next_power_of_2
from baton.kernels.moe.experts import ExpertWeights
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous

from .elementwise import BLOCK, activated_columns, activation_constants, down_scales, gate_up_scales
from .options import GemvOptions

MOST_PRELOADED = 192  # most weights that a thread of `down_few_kernel` preloads into registers
UNROLLED = tl.constexpr(4)  # concurrent loads of weights that are not preloaded


def fused_experts(
    x: Tensor,
    experts: ExpertWeights,
    expert_ids: Tensor,
    weights: Tensor,
    add_to: Tensor | None,
    options: GemvOptions,
) -> Tensor:
    """See `baton.kernels.moe.fused_experts`."""
    num_tokens, top_k = expert_ids.shape
    hidden_size, width = experts.hidden_size, experts.width
    activations = torch.empty((num_tokens, top_k, width), dtype=x.dtype, device=x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if add_to is None else add_to
    num_columns = experts.parts * width
    gate_up_few_kernel[(num_tokens * top_k, cdiv(num_columns, options.gate_up_columns))](
        x,
        experts.gate_up,
        experts.gate_up_scale,
        experts.gate_up_bias,
        expert_ids,
        activations,
        x.stride(0),
        COLUMNS=num_columns,
        DEPTH=hidden_size,
        TOP_K=top_k,
        BLOCK_COLUMNS=options.gate_up_columns,
        BLOCK_DEPTH=options.gate_up_depth,
        **activation_constants(experts.activation),
        num_warps=options.gate_up_warps,
        **launch_options(),
    )
    down_few_kernel[(num_tokens, cdiv(hidden_size, options.down_columns))](
        activations,
        experts.down,
        experts.down_scale,
        experts.down_bias,
        expert_ids,
        weights,
        out,
        out.stride(0),
        COLUMNS=hidden_size,
        DEPTH=width,
        TOP_K=top_k,
        PLACES=next_power_of_2(top_k),
        BLOCK_COLUMNS=options.down_columns,
        BLOCK_DEPTH=options.down_depth,
        PRELOADED=preloaded(width, top_k, options),
        ADD=add_to is not None,
        num_warps=options.down_warps,
        **launch_options(),
    )
    return out


def preloaded(width: int, top_k: int, options: GemvOptions) -> int:
    """Return the depth up to which `down_few_kernel` preloads every expert's weights into registers."""
    threads = 32 * options.down_warps
    values = next_power_of_2(top_k) * options.down_columns * options.down_depth // threads  # of a block
    return min(width, max(1, MOST_PRELOADED // max(values, 1)) * options.down_depth)


@triton.jit
def gate_up_few_kernel(
    x,  # [T, DEPTH]
    weight,  # [E, COLUMNS, DEPTH]
    scale,  # [E, 2 * blocks of COLUMNS / 2, blocks of DEPTH], without gates as many as `down`'s, or None
    bias,  # [E, COLUMNS] or None
    expert_ids,  # [T * TOP_K]
    out,  # [T * TOP_K, COLUMNS / 2], without gates [T * TOP_K, COLUMNS]
    x_stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    UNGATED: tl.constexpr,
    GATE: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
):
    pair = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    k = tl.arange(0, BLOCK_DEPTH)
    wait_for_previous()
    let_next_start()  # not earlier: `down_few_kernel` reads results of this kernel's predecessors without waiting
    expert = tl.load(expert_ids + pair)
    if expert >= 0:
        row = x + (pair // TOP_K).to(tl.int64) * x_stride
        weight_rows = weight + expert.to(tl.int64) * (COLUMNS * DEPTH) + column[:, None] * DEPTH
        SPAN: tl.constexpr = BLOCK if BLOCK_DEPTH > BLOCK else BLOCK_DEPTH  # of the depth, under one scale
        span = tl.arange(0, BLOCK_DEPTH // SPAN) * SPAN
        if scale is not None:
            scale_rows = gate_up_scales(scale, expert, column, COLUMNS, DEPTH, UNGATED)
        sums = tl.zeros([BLOCK_COLUMNS, BLOCK_DEPTH], tl.float32)
        for start in tl.static_range(0, DEPTH, BLOCK_DEPTH):
            inside = k < DEPTH - start
            read = tl.load(
                weight_rows + start + k[None, :], mask=(column < COLUMNS)[:, None] & inside[None, :], other=0.0
            )
            product = read.to(tl.float32) * tl.load(row + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
            if scale is not None:
                here = (column < COLUMNS)[:, None] & (start + span < DEPTH)[None, :]
                factor = tl.load(scale_rows[:, None] + (start + span)[None, :] // BLOCK, mask=here, other=0.0)
                product = _scaled(product, factor)
            sums += product
        products = tl.sum(sums, 1)
        if bias is not None:
            products += tl.load(bias + expert * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
        PARTS: tl.constexpr = 2 if UNGATED is None else 1
        activation = activated_columns(products[None, :], 1, BLOCK_COLUMNS, UNGATED, GATE, SLOPE, LIMIT, SHIFT)
        place = tl.program_id(1) * (BLOCK_COLUMNS // PARTS) + tl.arange(0, BLOCK_COLUMNS // PARTS)[None, :]
        to = out + pair.to(tl.int64) * (COLUMNS // PARTS) + place
        tl.store(to, activation.to(out.dtype.element_ty), mask=place < COLUMNS // PARTS)


@triton.jit
def down_few_kernel(
    activations,  # [T, TOP_K, DEPTH]
    weight,  # [E, COLUMNS, DEPTH]
    scale,  # [E, blocks of COLUMNS, blocks of DEPTH] or None
    bias,  # [E, COLUMNS] or None
    expert_ids,  # [T, TOP_K]
    routing_weights,  # [T, TOP_K] float32
    out,  # [T, COLUMNS], rows out_stride apart
    out_stride,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,  # TOP_K, rounded up to a power of two
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    PRELOADED: tl.constexpr,  # depth up to which weights are loaded before the activations are ready
    ADD: tl.constexpr,
):
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    place, k = tl.arange(0, PLACES), tl.arange(0, BLOCK_DEPTH)
    pair = token * TOP_K + place
    # The previous kernel let this one start after its predecessors had ended, so the routing is ready. Loads bypass L1,
    # which may have older values.
    expert = tl.load(expert_ids + pair, mask=place < TOP_K, other=-1, cache_modifier=".cg")
    routed = expert >= 0
    weight_rows = weight + expert.to(tl.int64)[:, None, None] * (COLUMNS * DEPTH) + column[None, :, None] * DEPTH
    readable = routed[:, None, None] & (column < COLUMNS)[None, :, None]
    SPAN: tl.constexpr = BLOCK if BLOCK_DEPTH > BLOCK else BLOCK_DEPTH
    span = tl.arange(0, BLOCK_DEPTH // SPAN)[None, None, :] * SPAN
    if scale is not None:
        scale_rows = down_scales(scale, expert[:, None], column[None, :], COLUMNS, DEPTH)[:, :, None]
    loaded, factors = (), ()
    for start in tl.static_range(0, PRELOADED, BLOCK_DEPTH):
        inside = (k < DEPTH - start)[None, None, :]
        if scale is not None:
            ahead = tl.load(scale_rows + (start + span) // BLOCK, mask=readable & (start + span < DEPTH), other=0.0)
            factors = factors + (ahead,)
        loaded = loaded + (tl.load(weight_rows + start + k[None, None, :], mask=readable & inside, other=0.0),)
    if bias is not None:
        bias_at = bias + expert[:, None] * COLUMNS + column[None, :]
        first = tl.load(bias_at, mask=routed[:, None] & (column < COLUMNS)[None, :], other=0.0)
    wait_for_previous()

    share = tl.load(routing_weights + pair, mask=routed, other=0.0)
    rows = (activations + pair * DEPTH)[:, None, None]
    sums = tl.zeros([PLACES, BLOCK_COLUMNS, BLOCK_DEPTH], tl.float32)
    for start in tl.static_range(0, PRELOADED, BLOCK_DEPTH):
        inside = (k < DEPTH - start)[None, None, :]
        row = tl.load(rows + start + k[None, None, :], mask=routed[:, None, None] & inside, other=0.0)
        product = loaded[start // BLOCK_DEPTH].to(tl.float32) * row.to(tl.float32)
        if scale is not None:
            product = _scaled(product, factors[start // BLOCK_DEPTH])
        sums += product
    for start in tl.range(PRELOADED, DEPTH, BLOCK_DEPTH, loop_unroll_factor=UNROLLED):
        inside = (k < DEPTH - start)[None, None, :]
        read = tl.load(weight_rows + start + k[None, None, :], mask=readable & inside, other=0.0)
        row = tl.load(rows + start + k[None, None, :], mask=routed[:, None, None] & inside, other=0.0)
        product = read.to(tl.float32) * row.to(tl.float32)
        if scale is not None:
            factor = tl.load(scale_rows + (start + span) // BLOCK, mask=readable & (start + span < DEPTH), other=0.0)
            product = _scaled(product, factor)
        sums += product
    outputs = tl.sum(sums, 2)
    if bias is not None:
        outputs += first.to(tl.float32)
    total = tl.sum(outputs * share[:, None], 0)
    to = out + token * out_stride + column
    if ADD:
        total += tl.load(to, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=column < COLUMNS)


@triton.jit
def _scaled(product, factor):
    """Multiply each of the SPANS equal parts of product [..., SPANS * n] by its factor [..., SPANS]."""
    SPANS: tl.constexpr = factor.shape[len(factor.shape) - 1]
    STRETCH: tl.constexpr = product.shape[len(product.shape) - 1] // SPANS
    stretches = tl.reshape(product, factor.shape + [STRETCH])
    return tl.reshape(stretches * tl.expand_dims(factor, len(factor.shape)), product.shape)

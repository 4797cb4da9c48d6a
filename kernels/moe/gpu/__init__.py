"""A mixture of experts on a GPU, in Triton.

    few tokens    gate_up -> down                       each (token, expert) pair separately (`gemv`)
    more tokens   align -> gate_up -> down -> combine   the rows of an expert together (`alignment`, `grouped_gemm`)

Neither synchronizes with the host, and no launch depends on the routing, so CUDA graphs can capture both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.moe.experts import ExpertWeights

from . import gemv, grouped_gemm
from .alignment import align
from .options import GroupedOptions, MoeShape, gemv_options, grouped_options
from .router import route, router_logits

__all__ = ["fused_experts", "grouped_experts", "route", "router_logits"]

ROW_BYTES = 16  # rows must begin at multiples of it, for wide loads and for TMA


def fused_experts(
    x: Tensor, experts: ExpertWeights, expert_ids: Tensor, weights: Tensor, add_to: Tensor | None
) -> Tensor:
    """See `baton.kernels.moe.fused_experts`. Weights and biases are contiguous; x and add_to have contiguous rows.

    Raises `ValueError` if rows of weights are not multiples of 16 bytes.
    """
    if experts.hidden_size * x.itemsize % ROW_BYTES or experts.width * x.itemsize % ROW_BYTES:
        raise ValueError(
            f"rows of {experts.hidden_size} and {experts.width} values: a GPU takes multiples of "
            f"{ROW_BYTES // x.itemsize} of {x.dtype}"
        )
    if len(x) == 0:
        return torch.empty_like(x) if add_to is None else add_to
    shape = MoeShape.of(experts, expert_ids)
    if shape.is_few:
        return gemv.fused_experts(x, experts, expert_ids, weights, add_to, gemv_options(shape, x.device))
    return grouped_experts(x, experts, expert_ids, weights, add_to, grouped_options(shape, x.device))


def grouped_experts(
    x: Tensor,
    experts: ExpertWeights,
    expert_ids: Tensor,
    weights: Tensor,
    add_to: Tensor | None,
    options: GroupedOptions,
) -> Tensor:
    """Compute `fused_experts` with grouped products over tiles, for at least one token."""
    tiles = align(expert_ids, experts.num_experts, options.block_rows)
    short_rows = options.short_rows
    activations = grouped_gemm.gate_up(x, experts, tiles, short_rows, expert_ids.shape[1], options.gate_up)
    outputs = grouped_gemm.down(activations, experts, tiles, short_rows, weights, options.down)
    return grouped_gemm.combine(outputs, expert_ids, add_to)

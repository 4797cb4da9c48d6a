"""Experts on a CPU: one matrix product for all tokens of an expert, in C++ where its matrices are in panels.

Such a product gives a token the same bits however many others the expert has. Torch's depend on their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.activation import Pointwise, activate_each, activation_and_mul
from baton.kernels.linear import PackedWeight, linear
from baton.kernels.linear.cpu import PANEL_ROWS, pack

from .experts import ExpertWeights, GatedActivation
from .reference import activated, of_expert


def pack_in_place(matrices: Tensor) -> bool:
    """Turn each of the matrices [E, N, K] into panels (`kernels.linear`) within its memory. Return whether it was done.

    Panels have whole groups of rows, so N must be a multiple of them. Each matrix remains one item of the first
    dimension, which may be copied to other places.
    """
    if matrices.shape[1] % PANEL_ROWS or not matrices.is_contiguous():
        return False
    for matrix in matrices:
        panels = pack(matrix)
        if panels is None:
            return False
        matrix.view(-1).copy_(panels.view(-1))
    return True


def fused_experts(
    x: Tensor, experts: ExpertWeights, expert_ids: Tensor, weights: Tensor, add_to: Tensor | None
) -> Tensor:
    """See `baton.kernels.moe.fused_experts`. Reads the weights of each used expert once."""
    num_tokens, top_k = expert_ids.shape
    pairs = expert_ids.flatten().argsort(stable=True)
    start, *counts = torch.bincount(expert_ids.flatten() + 1, minlength=experts.num_experts + 1).tolist()
    outputs = x.new_zeros((num_tokens * top_k, x.shape[1]))
    for expert, count in enumerate(counts):  # pairs without an expert are sorted before all others
        if count:
            chosen = pairs[start : start + count]
            gate_up, down = experts.matrices(expert, x.dtype)
            gate_up_bias, down_bias = of_expert(experts.gate_up_bias, expert), of_expert(experts.down_bias, expert)
            hidden = _product(x[chosen // top_k], gate_up, gate_up_bias, experts.gate_up_in_panels)
            hidden = _activated(hidden, experts.activation)
            outputs[chosen] = _product(hidden, down, down_bias, experts.down_in_panels)
            start += count
    # Experts are added in the order of the token's list, so that its sum does not depend on the batch.
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for place, output in enumerate(outputs.view(num_tokens, top_k, x.shape[1]).unbind(1)):
        total += output * weights[:, place, None]
    return total.to(x.dtype) if add_to is None else add_to.copy_(total + add_to)


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None, in_panels: bool) -> Tensor:
    return linear(x, PackedWeight(matrix, (matrix.shape[0], matrix.shape[1]), in_panels), bias)


def _activated(hidden: Tensor, activation: GatedActivation | Pointwise) -> Tensor:
    """See `reference.activated`; `hidden` may be written to."""
    if isinstance(activation, Pointwise):
        return activate_each(hidden, activation)
    if activation.is_plain:
        return activation_and_mul(hidden.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(1), activation.gate)
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return activated(wide, activation).to(hidden.dtype)

"""Reference of a mixture of experts: routing, and the weighted sum of the experts' outputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import elementwise
from baton.kernels.activation.reference import Activation, Pointwise, activate, pointwise

from .experts import ExpertWeights, GatedActivation, RoutingRule


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `baton.kernels.moe.router_logits`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def route(
    logits: Tensor,
    rule: RoutingRule,
    *,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `baton.kernels.moe.route`. Computes in float32 (float64 if `logits` are)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.softmax(-1) if rule.scoring == "softmax" else elementwise.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        grouped = choice.unflatten(-1, (rule.num_groups, -1))
        best = grouped.amax(-1) if rule.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, _first_best(best, rule.top_groups), True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    expert_ids = _first_best(choice, rule.top_k)
    weights = scores.gather(-1, expert_ids)
    if rule.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * rule.scale
    if expert_scale is not None:
        weights = weights * expert_scale[expert_ids]
    if slots is not None:
        padding = slots[:, None] < 0
        expert_ids, weights = expert_ids.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    return expert_ids.int(), weights.float() if weights.dtype == torch.float32 else weights


def _first_best(values: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest along the last dimension, highest first; of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def gated(gate: Tensor, up: Tensor, activation: GatedActivation) -> Tensor:
    """Return the activation of gates and ups of one shape."""
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.gate is Activation.SILU:
        return gate * elementwise.sigmoid(activation.slope * gate) * (up + activation.shift)
    return activate(gate, activation.gate) * (up + activation.shift)


def activated(products: Tensor, activation: GatedActivation | Pointwise) -> Tensor:
    """Return the activation of products [rows, 2 F], gates and ups next to each other, or of [rows, F] ups."""
    if isinstance(activation, GatedActivation):
        return gated(products[:, 0::2], products[:, 1::2], activation)
    return pointwise(products, activation)


def fused_experts(
    x: Tensor, experts: ExpertWeights, expert_ids: Tensor, weights: Tensor, add_to: Tensor | None = None
) -> Tensor:
    """See `baton.kernels.moe.fused_experts`. Sums in float32 (float64 if x is), activations in x's type."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result = rows.to(compute_dtype) @ weight.T
        return result if bias is None else result + bias

    total = torch.zeros(x.shape, dtype=compute_dtype, device=x.device)
    for expert in range(experts.num_experts):
        token, place = (expert_ids == expert).nonzero(as_tuple=True)
        gate_up, down = experts.matrices(expert, compute_dtype)
        hidden = product(x[token], gate_up, of_expert(experts.gate_up_bias, expert))
        activations = activated(hidden, experts.activation).to(x.dtype)
        out = product(activations, down, of_expert(experts.down_bias, expert))
        total.index_add_(0, token, out * weights[token, place, None].to(compute_dtype))
    return total.to(x.dtype) if add_to is None else add_to.copy_(total + add_to)


def of_expert(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]

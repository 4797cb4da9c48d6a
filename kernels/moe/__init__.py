"""Mixture of experts: routing of tokens to experts, and the weighted sum of the experts' outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from baton.kernels import linear
from baton.kernels.linear import PackedWeight

from . import cpu, reference
from .experts import SILU, ExpertWeights, GatedActivation, RoutingRule

__all__ = [
    "SILU",
    "ExpertWeights",
    "GatedActivation",
    "RoutingRule",
    "fused_experts",
    "pack",
    "pack_router",
    "route",
    "router_logits",
]


def pack_router(weight: Tensor) -> Tensor | PackedWeight:
    """Return a router's weight [E, H] for `router_logits`: on a CPU in float32 and in panels, otherwise as it is."""
    packed = linear.pack(weight.float()) if weight.is_cpu and weight.dtype != torch.float64 else None
    return packed if packed is not None and packed.in_panels else weight


def pack(experts: ExpertWeights) -> ExpertWeights:
    """Return experts for `fused_experts`. On a CPU, their matrices are rearranged in place, if that is faster."""
    if not experts.down.is_cpu or experts.in_8_bits:
        return experts
    gate_up, down = (cpu.pack_in_place(matrices) for matrices in (experts.gate_up, experts.down))
    return replace(experts, gate_up_in_panels=gate_up, down_in_panels=down)


def router_logits(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.T + bias`: x [T, H], weight [E, H], bias [E] -> [T, E].

    Sums and result are float32 (float64 if x is). A float32 weight is not rounded to x's dtype.
    """
    if isinstance(weight, PackedWeight):
        return linear.linear(x.float(), weight, None if bias is None else bias.float())
    if x.is_cuda and x.dtype == weight.dtype != torch.float32:
        from . import gpu

        return gpu.router_logits(x, weight, bias)
    return reference.router_logits(x, weight, bias)


def route(
    logits: Tensor,
    rule: RoutingRule,
    *,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts by logits [T, E]; return their ids [T, K] int32, best first, and weights [T, K] float32.

    `bias` [E] float32 is added to the scores that choose experts, but not to their weights. Weights are multiplied by
    the `expert_scale` [E] float32 of their experts. Tokens with a negative slot (`slots` [T] int64) are padding: their
    expert is -1, their weight 0. Raises `ValueError` if the rule does not fit the number of experts.
    """
    rule.check(logits.shape[1])
    if logits.is_cuda:
        from . import gpu

        return gpu.route(logits, rule, bias=bias, expert_scale=expert_scale, slots=slots)
    return reference.route(logits, rule, bias=bias, expert_scale=expert_scale, slots=slots)


def fused_experts(
    x: Tensor, experts: ExpertWeights, expert_ids: Tensor, weights: Tensor, *, add_to: Tensor | None = None
) -> Tensor:
    """Return the sum over k of expert `expert_ids[:, k]`'s output for x, times `weights[:, k]`: [T, H].

    x is [T, H]; expert_ids [T, K] int32, -1 for none; weights [T, K] float32. With `add_to` [T, H], which must not
    overlap x, the sum is added to it in place, and it is returned. Sums are float32; each expert's output may be
    rounded to x's dtype before it is added. Results are deterministic. Tokens without experts read no weights. Raises
    `ValueError` for shapes that do not match.
    """
    if x.shape[1:] != (experts.hidden_size,):
        raise ValueError(f"x is {list(x.shape)}: give [T, {experts.hidden_size}]")
    if expert_ids.shape != weights.shape or expert_ids.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"expert_ids {list(expert_ids.shape)} and weights {list(weights.shape)}: give [{x.shape[0]}, K] each"
        )
    return _implementation(x)(x, experts, expert_ids, weights, add_to)


def _implementation(x: Tensor) -> Callable[..., Tensor]:
    if x.is_cuda:
        from . import gpu

        return gpu.fused_experts
    return cpu.fused_experts if x.is_cpu else reference.fused_experts

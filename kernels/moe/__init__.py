"""A mixture of experts: which experts each token goes to, and the weighted sum of their outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cpu, reference
from .rule import RoutingRule

__all__ = ["RoutingRule", "fused_experts", "route", "router_logits"]


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`: x [T, H], weight [E, H] -> [T, E], summed and kept in float32 (float64 where x is)."""
    if x.is_cuda and x.dtype != torch.float32:
        from . import gpu

        return gpu.router_logits(x, weight)
    return reference.router_logits(x, weight)


def route(
    logits: Tensor, rule: RoutingRule, *, bias: Tensor | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of logits [T, E] (any floating type): expert ids [T, K] int32, best first, and their weights [T, K] float32.

    `bias` [E] float32 is added to the scores where experts are chosen, not where they are weighed. Tokens whose slot
    (`slots` [T] int64) is negative are padding: their expert is -1, their weight 0. Raises `ValueError` for a number of
    experts that the rule does not fit.
    """
    rule.check(logits.shape[1])
    if logits.is_cuda:
        from . import gpu

        return gpu.route(logits, rule, bias=bias, slots=slots)
    return reference.route(logits, rule, bias=bias, slots=slots)


def fused_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor, *, add_to: Tensor | None = None
) -> Tensor:
    """`sum over k of weights[:, k] * down(silu(gate(x)) * up(x))` of expert `expert_ids[:, k]`: [T, H].

    x [T, H]; gate_up [E, 2 F, H]: row 2 i of an expert is row i of its gate, row 2 i + 1 row i of its up matrix; down
    [E, H, F]; expert_ids [T, K] int32, -1 for none; weights [T, K] float32. With `add_to` [T, H], which shares nothing
    with x, the sum is added to it in place, and it is returned. Sums in float32; what each expert gives may be rounded
    to x's type before it is added. The same inputs give the same bits. Tokens without experts read no weights. Raises
    `ValueError` for shapes that do not fit each other.
    """
    num_experts, twice_width, hidden_size = gate_up.shape
    if x.shape[1:] != (hidden_size,) or down.shape != (num_experts, hidden_size, twice_width // 2) or twice_width % 2:
        raise ValueError(
            f"x {list(x.shape)}, gate_up {list(gate_up.shape)} and down {list(down.shape)} do not fit: "
            "give [T, H], [E, 2 F, H] and [E, H, F]"
        )
    if expert_ids.shape != weights.shape or expert_ids.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"expert_ids {list(expert_ids.shape)} and weights {list(weights.shape)}: give [{x.shape[0]}, K] each"
        )
    if x.is_cuda:
        from . import gpu

        return gpu.fused_experts(x, gate_up, down, expert_ids, weights, add_to)
    if x.is_cpu:
        return cpu.fused_experts(x, gate_up, down, expert_ids, weights, add_to)
    return reference.fused_experts(x, gate_up, down, expert_ids, weights, add_to)

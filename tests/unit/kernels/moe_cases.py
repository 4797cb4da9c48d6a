"""Small mixtures of experts for the tests: weights, tokens, and difficult routings."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.activation import Activation, Pointwise
from baton.kernels.fp8 import quantize_weight
from baton.kernels.moe import ExpertWeights, GatedActivation

GPT_OSS = GatedActivation(slope=1.702, limit=1.0, shift=1.0)  # a limit so low that it often applies
GELU = GatedActivation(gate=Activation.GELU_TANH)

KINDS = pytest.mark.parametrize(
    "kind",
    [{}, {"like_gpt_oss": True}, {"gelu": True}, {"gated": False}, {"like_gpt_oss": True, "gated": False}],
    ids=["plain", "gpt-oss", "GELU", "without gates", "without gates, with biases"],
)

Inputs = tuple[Tensor, ExpertWeights, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Mixture:
    x: Tensor
    experts: ExpertWeights
    expert_ids: Tensor
    weights: Tensor
    add_to: Tensor

    @property
    def inputs(self) -> Inputs:
        """The arguments of an implementation, which may write to the last one."""
        return (self.x, self.experts, self.expert_ids, self.weights, self.add_to.clone())

    def to(self, target: torch.dtype | torch.device) -> Mixture:
        """Convert to another floating type (expert ids stay integers), or move elsewhere."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            is_wide = value.is_floating_point() and value.dtype != torch.float8_e4m3fn
            return value.to(target) if is_wide or isinstance(target, torch.device) else value

        experts = replace(
            self.experts, **{field.name: moved(getattr(self.experts, field.name)) for field in fields(ExpertWeights)}
        )
        return Mixture(moved(self.x), experts, moved(self.expert_ids), moved(self.weights), moved(self.add_to))


def in_8_bits(experts: ExpertWeights) -> ExpertWeights:
    """Quantize to E4M3 with a scale per block; rows differ in magnitude, so that a wrong scale is noticed."""

    def narrow(matrices: Tensor) -> tuple[Tensor, Tensor]:
        made = []
        for matrix in matrices:
            rows, depth = matrix.shape
            sizes = torch.rand(-(-rows // 128), 1, 1) + 0.1
            blocks = functional.pad(matrix, (0, -depth % 128, 0, -rows % 128)).unflatten(0, (-1, 128)) * sizes
            quantized = quantize_weight(blocks.flatten(0, 1), in_blocks=True)
            made.append((quantized.data[:rows, :depth], quantized.scale))
        data, scales = zip(*made, strict=True)
        return torch.stack(data), torch.stack(scales)

    parts, down = experts.parts, narrow(experts.down)
    each = [narrow(experts.gate_up[:, first::parts]) for first in range(parts)]  # gates and ups, or ups
    data, scales = (torch.stack(of_each, dim=2).flatten(1, 2) for of_each in zip(*each, strict=True))
    return replace(experts, gate_up=data, gate_up_scale=scales, down=down[0].contiguous(), down_scale=down[1])


def mixture(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    width: int,
    *,
    seed: int = 0,
    padding: int = 0,
    like_gpt_oss: bool = False,
    gated: bool = True,
    gelu: bool = False,
) -> Mixture:
    """Draw a mixture in float32. Every token has `top_k` different experts, the last `padding` tokens have none.

    Experts are plain, or have biases and an activation with limits, or apply GELU to their gates, or have no gates
    and a squared ReLU.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, spread: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * spread

    expert_ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)[:, :top_k].int()
    expert_ids[num_tokens - padding :] = -1
    experts = ExpertWeights(
        normal(num_experts, 2 * width, hidden_size, spread=hidden_size**-0.5),
        normal(num_experts, hidden_size, width, spread=width**-0.5),
    )
    if like_gpt_oss:
        biases = normal(num_experts, 2 * width), normal(num_experts, hidden_size)
        experts = replace(experts, gate_up_bias=biases[0], down_bias=biases[1], activation=GPT_OSS)
    if gelu:
        experts = replace(experts, activation=GELU)
    if not gated:
        ups = experts.gate_up[:, :width].contiguous()
        bias = None if experts.gate_up_bias is None else experts.gate_up_bias[:, :width].contiguous()
        experts = replace(experts, gate_up=ups, gate_up_bias=bias, activation=Pointwise.RELU2)
    return Mixture(
        x=normal(num_tokens, hidden_size),
        experts=experts,
        expert_ids=expert_ids,
        weights=torch.rand(num_tokens, top_k, generator=generator).masked_fill(expert_ids < 0, 0.0),
        add_to=normal(num_tokens, hidden_size),
    )

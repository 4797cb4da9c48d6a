"""Small mixtures of experts for the tests: weights, tokens, and routings with every shape of trouble."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixture:
    x: Tensor
    gate_up: Tensor
    down: Tensor
    expert_ids: Tensor
    weights: Tensor
    add_to: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arguments of `fused_experts`, which may write into the last of them."""
        return (self.x, self.gate_up, self.down, self.expert_ids, self.weights, self.add_to.clone())

    def to(self, target: torch.dtype | torch.device) -> Mixture:
        """Of another floating type (expert ids stay integers), or elsewhere."""
        move = isinstance(target, torch.device)
        return Mixture(*(t.to(target) if move or t.is_floating_point() else t for t in self.tensors))


def mixture(
    num_tokens: int, num_experts: int, top_k: int, hidden_size: int, width: int, *, seed: int = 0, padding: int = 0
) -> Mixture:
    """Random, in float32; every token has `top_k` different experts, the last `padding` ones have none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, spread: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * spread

    expert_ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1)[:, :top_k].int()
    expert_ids[num_tokens - padding :] = -1
    return Mixture(
        x=normal(num_tokens, hidden_size),
        gate_up=normal(num_experts, 2 * width, hidden_size, spread=hidden_size**-0.5),
        down=normal(num_experts, hidden_size, width, spread=width**-0.5),
        expert_ids=expert_ids,
        weights=torch.rand(num_tokens, top_k, generator=generator).masked_fill(expert_ids < 0, 0.0),
        add_to=normal(num_tokens, hidden_size),
    )

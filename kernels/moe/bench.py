"""Benchmark of mixtures of experts: few tokens (bound by reading weights), many (bound by arithmetic)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, cycling

from . import ExpertWeights, GatedActivation, RoutingRule, fused_experts, route
from .experts import BLOCK

ROUTINGS = 8  # routings that a case cycles through, so that a few tokens do not use the same experts twice in a row
SMALL = {"small": (8, 2, 512, 256)}  # experts, top k, hidden size, width of an expert
LARGE = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "dsv2-lite": (64, 6, 2048, 1408),
    "qwen3-next": (512, 10, 2048, 512),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "qwen3-30b-a3b in 8 bits": (128, 8, 2048, 768),
    "an eighth of deepseek-v3 in 8 bits": (32, 8, 7168, 2048),
}
FEW, MANY = (1, 64), (1, 8, 64, 256, 2048, 16384)


def experts_of(name: str, device: torch.device) -> ExpertWeights:
    """Return random experts with a model's sizes; those of gpt-oss have biases and its activation."""
    num_experts, _, hidden_size, width = (SMALL | LARGE)[name]
    gate_up = torch.empty(num_experts, 2 * width, hidden_size, dtype=torch.bfloat16, device=device)
    down = torch.empty(num_experts, hidden_size, width, dtype=torch.bfloat16, device=device)
    if is_in_8_bits(name):
        deep, wide = hidden_size // BLOCK, width // BLOCK
        return ExpertWeights(
            gate_up.normal_().to(torch.float8_e4m3fn),
            down.normal_().to(torch.float8_e4m3fn),
            gate_up_scale=torch.full((num_experts, 2 * wide, deep), hidden_size**-0.5, device=device),
            down_scale=torch.full((num_experts, deep, wide), width**-0.5, device=device),
        )
    gate_up.normal_(std=hidden_size**-0.5)
    down.normal_(std=width**-0.5)
    if not name.startswith("gpt-oss"):
        return ExpertWeights(gate_up, down)
    biases = torch.randn_like(gate_up[:, :, 0]), torch.randn_like(down[:, :, 0])
    return ExpertWeights(gate_up, down, *biases, GatedActivation(slope=1.702, limit=7.0, shift=1.0))


def is_in_8_bits(name: str) -> bool:
    return name.endswith("in 8 bits")


def cases(device: torch.device) -> Iterator[BenchCase]:
    shapes, counts = (LARGE, MANY) if device.type == "cuda" else (SMALL, FEW)
    for name, (num_experts, top_k, hidden_size, width) in shapes.items():
        experts = experts_of(name, device)
        dtype = torch.bfloat16
        expert_bytes = 3 * width * hidden_size * experts.down.itemsize
        for num_tokens in counts:
            x = torch.randn(num_tokens, hidden_size, dtype=dtype, device=device)
            all_logits = torch.randn(ROUTINGS, num_tokens, num_experts, device=device)
            routed = [route(logits, RoutingRule(top_k, renormalize=True)) for logits in all_logits]
            used = sum(expert_ids.unique().numel() for expert_ids, _ in routed) / ROUTINGS
            yield BenchCase(
                op="moe",
                shape=f"{name} {num_tokens} tokens, {used:.0f} experts",
                dtype=dtype,
                device=device,
                run=cycling(lambda pair, x=x, experts=experts: fused_experts(x, experts, *pair), routed),
                num_bytes=used * expert_bytes + 2 * x.nbytes,
                flop=6.0 * num_tokens * top_k * hidden_size * width,
            )

"""A mixture of experts: few tokens (bound by reading weights), many (bound by arithmetic)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.kernels.roofline import BenchCase, cycling

from . import RoutingRule, fused_experts, route

ROUTINGS = 8  # that a case takes turns over: few tokens never ask for the same experts twice in a row
SMALL = {"small": (8, 2, 512, 256)}  # experts, top k, hidden size, width of an expert
LARGE = {"qwen3-30b-a3b": (128, 8, 2048, 768), "dsv2-lite": (64, 6, 2048, 1408)}
FEW, MANY = (1, 64), (1, 8, 64, 256, 2048, 16384)


def weights_of(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both weights of a mixture, as `fused_experts` takes them."""
    num_experts, _, hidden_size, width = (SMALL | LARGE)[name]
    gate_up = torch.empty(num_experts, 2 * width, hidden_size, dtype=torch.bfloat16, device=device)
    down = torch.empty(num_experts, hidden_size, width, dtype=torch.bfloat16, device=device)
    return gate_up.normal_(std=hidden_size**-0.5), down.normal_(std=width**-0.5)


def cases(device: torch.device) -> Iterator[BenchCase]:
    shapes, counts = (LARGE, MANY) if device.type == "cuda" else (SMALL, FEW)
    for name, (num_experts, top_k, hidden_size, width) in shapes.items():
        gate_up, down = weights_of(name, device)
        dtype = down.dtype
        expert_bytes = 3 * width * hidden_size * dtype.itemsize
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
                run=cycling(lambda pair, x=x, up=gate_up, down=down: fused_experts(x, up, down, *pair), routed),
                num_bytes=used * expert_bytes + 2 * x.nbytes,
                flop=6.0 * num_tokens * top_k * hidden_size * width,
            )

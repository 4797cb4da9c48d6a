"""Benchmark of 8-bit linear layers, input in and output out in bfloat16: from one token (bound by memory) to many."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import has_gpu_kernels, linear
from .weight import BLOCK, Fp8Weight

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}  # N, K
TOKENS = (1, 16, 64, 256, 8192)


def cases(device: torch.device) -> Iterator[BenchCase]:
    """Yield the cases; none on devices that use the reference, which dequantizes the weight in every call."""
    if not has_gpu_kernels(device):
        return
    for name, (columns, depth) in SHAPES.items():
        copies = copies_beyond_caches(columns * depth)
        for in_blocks in (True, False):
            weights = [random_weight(columns, depth, in_blocks, device) for _ in range(copies)]
            for tokens in TOKENS:
                x = torch.randn(tokens, depth, dtype=torch.bfloat16, device=device)
                yield BenchCase(
                    op="fp8",
                    shape=f"{name} {tokens} x {columns} x {depth} {weights[0].scaled_by}",
                    dtype=torch.float8_e4m3fn,
                    device=device,
                    run=cycling(lambda weight, x=x: linear(x, weight), weights),
                    num_bytes=columns * depth + 2 * tokens * (columns + depth),
                    flop=2.0 * tokens * columns * depth,
                )


def random_weight(columns: int, depth: int, in_blocks: bool, device: torch.device) -> Fp8Weight:
    """Return a weight of random finite bits with scales of one; the values do not affect the time."""
    bits = torch.randint(0, 0x70, (columns, depth), dtype=torch.uint8, device=device)
    scale_shape = (-(-columns // BLOCK), depth // BLOCK) if in_blocks else (columns,)
    return Fp8Weight(bits.view(torch.float8_e4m3fn), torch.ones(scale_shape, device=device))

"""Benchmark of linear layers, from one row (bound by memory) to many (bound by arithmetic)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import Activation, RowNorm, gated_linear, linear, pack


@dataclass(frozen=True)
class LayerShape:
    """A linear layer, and the operations that a decoder fuses with it."""

    name: str
    columns: int  # columns of the result
    depth: int
    gated: bool = False
    norm: bool = False
    add: bool = False

    @property
    def activation(self) -> Activation | None:
        return Activation.SILU if self.gated else None

    @property
    def weight_rows(self) -> int:
        return 2 * self.columns if self.gated else self.columns


LAYERS = (
    LayerShape("0.6b qkv", 4096, 1024, norm=True),
    LayerShape("0.6b o", 1024, 2048, add=True),
    LayerShape("0.6b gate_up", 3072, 1024, gated=True, norm=True),
    LayerShape("0.6b down", 1024, 3072, add=True),
    LayerShape("0.6b head", 151936, 1024),
    LayerShape("8b qkv", 6144, 4096, norm=True),
    LayerShape("8b o", 4096, 4096, add=True),
    LayerShape("8b gate_up", 12288, 4096, gated=True, norm=True),
    LayerShape("8b down", 4096, 12288, add=True),
    LayerShape("8b head", 151936, 4096),
    LayerShape("30b qkv", 5120, 2048, norm=True),
    LayerShape("30b o", 2048, 4096, add=True),
    LayerShape("30b head", 151936, 2048),
    LayerShape("dsv2-lite q, latents", 3648, 2048, norm=True),
    LayerShape("dsv2-lite o", 2048, 2048, add=True),
    LayerShape("dsv2-lite router", 64, 2048),
    LayerShape("dsv2-lite shared gate_up", 2816, 2048, gated=True),
    LayerShape("dsv2-lite shared down", 2048, 2816, add=True),
    LayerShape("dsv2-lite head", 102400, 2048),
)

ON_CPU = (
    LayerShape("qkv", 2048, 1024),
    LayerShape("gate_up", 6144, 1024),
    LayerShape("down", 1024, 3072),
    LayerShape("lm_head", 8192, 1024),
)
TOKENS_ON_CPU = (1, 4, 16, 64, 512)
TOKENS_ON_GPU = (1, 4, 16, 64, 256)


def cases(device: torch.device) -> Iterator[BenchCase]:
    if device.type == "cuda":
        for shape in LAYERS:
            yield from _cases_of(shape, torch.bfloat16, TOKENS_ON_GPU, device)
        return
    for shape in ON_CPU:
        for dtype in (torch.bfloat16, torch.float32):
            yield from _cases_of(shape, dtype, TOKENS_ON_CPU, device)


def _cases_of(
    shape: LayerShape, dtype: torch.dtype, counts: tuple[int, ...], device: torch.device
) -> Iterator[BenchCase]:
    """Yield cases of a layer with the norm, gate or addition that a decoder fuses with it."""
    rows, columns, depth = shape.weight_rows, shape.columns, shape.depth
    weight_bytes = rows * depth * dtype.itemsize
    copies = copies_beyond_caches(weight_bytes)
    weights = [pack(torch.randn(rows, depth, dtype=dtype, device=device)) for _ in range(copies)]
    norm = RowNorm(torch.ones(depth, dtype=dtype, device=device), 1e-6) if shape.norm else None
    for tokens in counts:
        x = torch.randn(tokens, depth, dtype=dtype, device=device)
        hidden = torch.zeros(tokens, columns, dtype=dtype, device=device) if shape.add else None
        if shape.gated:
            run = cycling(lambda weight, x=x: gated_linear(x, weight, norm=norm), weights)
        else:
            run = cycling(lambda weight, x=x, hidden=hidden: linear(x, weight, norm=norm, add_to=hidden), weights)
        yield BenchCase(
            op="linear",
            shape=f"{shape.name} {tokens} x {rows} x {depth}",
            dtype=dtype,
            device=device,
            run=run,
            num_bytes=weight_bytes + tokens * (columns + depth) * dtype.itemsize,
            flop=2.0 * tokens * rows * depth,
        )

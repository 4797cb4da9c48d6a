"""Linear layers, from one row (bound by memory) to many (bound by arithmetic)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import RowNorm, gated_linear, linear, pack
from .shapes import LAYERS, LayerShape

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
    """The layer with what a decoder puts around it."""
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

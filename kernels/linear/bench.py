"""Linear layers of a small model, from one row (bound by memory) to many (bound by arithmetic)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import linear, pack

ROWS = (1, 4, 16, 64, 512)
SHAPES = {"qkv": (2048, 1024), "gate_up": (6144, 1024), "down": (1024, 3072), "lm_head": (8192, 1024)}  # N, K


def cases() -> Iterator[BenchCase]:
    for name, (columns, depth) in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            weight_bytes = columns * depth * dtype.itemsize
            weights = [
                pack(torch.randn(columns, depth, dtype=dtype)) for _ in range(copies_beyond_caches(weight_bytes))
            ]
            for rows in ROWS:
                x = torch.randn(rows, depth, dtype=dtype)
                yield BenchCase(
                    op="linear",
                    shape=f"{name} {rows} x {columns} x {depth}",
                    dtype=dtype,
                    run=cycling(lambda weight, x=x: linear(x, weight), weights),
                    num_bytes=weight_bytes + rows * (columns + depth) * dtype.itemsize,
                    flop=2.0 * rows * columns * depth,
                )

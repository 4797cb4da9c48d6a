"""The gated activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import silu_and_mul

WIDTH = 3072


def cases() -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    for rows in (1, 16, 512):
        out_bytes = rows * WIDTH * dtype.itemsize
        copies = min(64, copies_beyond_caches(2 * out_bytes))
        inputs = [torch.randn(rows, 2 * WIDTH, dtype=dtype) for _ in range(copies)]
        yield BenchCase(
            op="silu_and_mul",
            shape=f"{rows} x {WIDTH}",
            dtype=dtype,
            run=cycling(silu_and_mul, inputs),
            num_bytes=3 * out_bytes,
        )

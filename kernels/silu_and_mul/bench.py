"""The gated activation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import silu_and_mul

ON_CPU = ((1, 3072), (16, 3072), (512, 3072))  # rows, width of the result
ON_GPU = ((1, 3072), (64, 3072), (64, 12288), (16384, 3072), (8192, 12288))


def cases(device: torch.device) -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    for rows, width in ON_GPU if device.type == "cuda" else ON_CPU:
        out_bytes = rows * width * dtype.itemsize
        copies = min(64, copies_beyond_caches(2 * out_bytes))
        inputs = [torch.randn(rows, 2 * width, dtype=dtype, device=device) for _ in range(copies)]
        yield BenchCase(
            op="silu_and_mul",
            shape=f"{rows} x {width}",
            dtype=dtype,
            device=device,
            run=cycling(silu_and_mul, inputs),
            num_bytes=3 * out_bytes,
        )

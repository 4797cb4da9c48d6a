"""Benchmark of RMSNorm with and without a residual, and of gated heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import gated_rms_norm, rms_norm

ON_CPU = ((1, 1024), (16, 1024), (4096, 1024))  # rows, width
GATED = (1, 64, 16384)  # tokens, with 32 heads of 128
ON_GPU = ((1, 1024), (64, 1024), (1, 4096), (64, 4096), (1024, 4096), (16384, 1024), (16384, 4096))


def cases(device: torch.device) -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    for rows, width in ON_GPU if device.type == "cuda" else ON_CPU:
        weight = torch.randn(width, dtype=dtype, device=device)
        for with_residual in (False, True):
            x_bytes = rows * width * dtype.itemsize
            copies = min(64, copies_beyond_caches(x_bytes))
            inputs = [torch.randn(rows, width, dtype=dtype, device=device) for _ in range(copies)]
            residual = torch.randn(rows, width, dtype=dtype, device=device) if with_residual else None
            yield BenchCase(
                op="rms_norm",
                shape=f"{rows} x {width}{' + residual' if with_residual else ''}",
                dtype=dtype,
                device=device,
                run=cycling(lambda x, w=weight, residual=residual: rms_norm(x, w, 1e-6, residual), inputs),
                num_bytes=(4 if with_residual else 2) * x_bytes,
            )
    for tokens in GATED if device.type == "cuda" else GATED[:2]:
        yield _gated_case(tokens, dtype, device)


def _gated_case(tokens: int, dtype: torch.dtype, device: torch.device) -> BenchCase:
    x_bytes = tokens * 32 * 128 * dtype.itemsize
    copies = min(64, copies_beyond_caches(2 * x_bytes))
    inputs = [torch.randn(2, tokens, 32, 128, dtype=dtype, device=device) for _ in range(copies)]
    weight = torch.randn(128, device=device)
    return BenchCase(
        op="rms_norm",
        shape=f"{tokens} x 32 x 128, gated",
        dtype=dtype,
        device=device,
        run=cycling(lambda pair: gated_rms_norm(pair[0], weight, pair[1], 1e-6), inputs),
        num_bytes=3 * x_bytes,
    )

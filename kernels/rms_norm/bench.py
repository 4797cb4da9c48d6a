"""RMSNorm with and without a residual."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import rms_norm

WIDTH = 1024


def cases() -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    weight = torch.randn(WIDTH, dtype=dtype)
    for rows in (1, 16, 4096):
        for with_residual in (False, True):
            x_bytes = rows * WIDTH * dtype.itemsize
            inputs = [torch.randn(rows, WIDTH, dtype=dtype) for _ in range(min(64, copies_beyond_caches(x_bytes)))]
            residual = torch.randn(rows, WIDTH, dtype=dtype) if with_residual else None
            yield BenchCase(
                op="rms_norm",
                shape=f"{rows} x {WIDTH}{' + residual' if with_residual else ''}",
                dtype=dtype,
                run=cycling(lambda x, residual=residual: rms_norm(x, weight, 1e-6, residual), inputs),
                num_bytes=(4 if with_residual else 2) * x_bytes,
            )

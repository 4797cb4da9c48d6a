"""RMSNorm with and without a residual."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import rms_norm

ON_CPU = ((1, 1024), (16, 1024), (4096, 1024))  # rows, width
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

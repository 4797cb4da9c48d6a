"""Benchmark of the activations, with gates and without, of gates of heads and of the soft cap."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import Activation, activation_and_mul, gate_heads, soft_cap

ON_CPU = ((1, 3072), (16, 3072), (512, 3072))  # rows, width of the result
ON_GPU = ((1, 3072), (64, 3072), (64, 12288), (16384, 3072), (8192, 12288))
LOGITS = ((1, 256_000), (64, 256_000))  # rows, vocabulary


def cases(device: torch.device) -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    for rows, width in ON_GPU if device.type == "cuda" else ON_CPU:
        out_bytes = rows * width * dtype.itemsize
        copies = min(64, copies_beyond_caches(2 * out_bytes))
        inputs = [torch.randn(rows, 2 * width, dtype=dtype, device=device) for _ in range(copies)]
        for activation in Activation:
            yield BenchCase(
                op="activation",
                shape=f"{activation.value} {rows} x {width}",
                dtype=dtype,
                device=device,
                run=cycling(lambda x, activation=activation: activation_and_mul(x, activation), inputs),
                num_bytes=3 * out_bytes,
            )
    for rows, width in ON_GPU if device.type == "cuda" else ON_CPU:
        num_bytes = rows * width * dtype.itemsize
        copies = min(64, copies_beyond_caches(2 * num_bytes))
        heads = [torch.randn(rows, width // 256, 512, dtype=dtype, device=device) for _ in range(copies)]
        yield BenchCase(
            op="activation",
            shape=f"gates of heads {rows} x {width}",
            dtype=dtype,
            device=device,
            run=cycling(lambda x: gate_heads(x[..., :256], x[..., 256:]), heads),
            num_bytes=3 * num_bytes,
        )
    for rows, width in LOGITS:
        num_bytes = rows * width * dtype.itemsize
        copies = min(64, copies_beyond_caches(num_bytes))
        logits = [torch.randn(rows, width, dtype=dtype, device=device) for _ in range(copies)]
        yield BenchCase(
            op="activation",
            shape=f"soft cap {rows} x {width}",
            dtype=dtype,
            device=device,
            run=cycling(lambda x: soft_cap(x, 30.0), logits),
            num_bytes=2 * num_bytes,
        )

"""Benchmark of copies of KV blocks into a staging buffer and back: each byte is read once and written once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase

from . import copy_blocks, gather_blocks, scatter_blocks

BLOCK_SIZE = 16
# layers, KV heads, head_dim, blocks moved, heads moved of each
ON_CPU = ((4, 2, 64, 64, 2),)
ON_GPU = ((28, 8, 128, 128, 8), (36, 8, 128, 128, 8), (36, 8, 128, 512, 2), (48, 4, 128, 8, 4))


def cases(device: torch.device) -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    for layers, kv_heads, dim, count, heads in ON_GPU if device.type == "cuda" else ON_CPU:
        kv = torch.zeros(2 * count, kv_heads, layers, 2, BLOCK_SIZE, dim, dtype=dtype, device=device)
        ids = torch.randperm(2 * count, dtype=torch.int32, device=device)
        staging = torch.zeros(count, heads, layers, 2, BLOCK_SIZE, dim, dtype=dtype, device=device)
        shape = f"{count} x {heads}/{kv_heads} heads, {layers} layers"
        runs = {
            "gather": lambda kv=kv, ids=ids[:count], staging=staging: gather_blocks(kv, ids, staging),
            "scatter": lambda kv=kv, ids=ids[:count], staging=staging: scatter_blocks(staging, ids, kv),
        }
        if heads == kv_heads:
            runs["copy"] = lambda kv=kv, ids=ids, count=count: copy_blocks(kv, ids[:count], ids[count:])
        for name, run in runs.items():
            yield BenchCase(
                op="block_copy",
                shape=f"{name} {shape}",
                dtype=dtype,
                device=device,
                run=run,
                num_bytes=2 * staging.nbytes,
            )

"""Benchmark of head norm, rotation and KV write of one layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.roofline import BenchCase, cycling

from . import rope_and_cache

BLOCK_SIZE = 16
# heads, KV heads, head_dim, layers, tokens
ON_CPU = ((16, 8, 64, 14, 1), (16, 8, 64, 14, 16), (16, 8, 64, 14, 512))
ON_GPU = (
    (16, 8, 128, 28, 1),
    (32, 8, 128, 36, 1),
    (32, 8, 128, 36, 64),
    (16, 8, 128, 28, 8192),
    (32, 8, 128, 4, 16384),
)


def cases(device: torch.device) -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    for heads, kv_heads, dim, layers, tokens in ON_GPU if device.type == "cuda" else ON_CPU:
        blocks = torch.randperm(-(-tokens // BLOCK_SIZE), dtype=torch.int32, device=device).view(1, -1)
        batch = AttentionBatch.plan([tokens], [tokens], blocks, BLOCK_SIZE)
        kv = torch.zeros(blocks.numel(), kv_heads, layers, 2, BLOCK_SIZE, dim, dtype=dtype, device=device)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        norm = torch.ones(dim, dtype=dtype, device=device)
        angles = torch.randn(tokens, dim // 2, device=device)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)

        def run(layer: int, q=q, k=k, v=v, kv=kv, batch=batch, cos_sin=cos_sin, norm=norm) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return rope_and_cache(q, k, v, cos_sin, kv, layer, batch, q_norm=norm, k_norm=norm, eps=1e-6)

        yield BenchCase(
            op="rope_kv",
            shape=f"{tokens} tokens, {heads}/{kv_heads} heads of {dim}, norms",
            dtype=dtype,
            device=device,
            run=cycling(run, range(layers)),
            num_bytes=(2 * q.numel() + 4 * k.numel()) * dtype.itemsize + cos_sin.nbytes,
        )

"""Head norm, rotation and KV write of one layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.attention import AttentionBatch
from baton.kernels.roofline import BenchCase, cycling

from . import rope_and_cache

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK_SIZE = 16, 8, 64, 14, 16


def cases() -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    for tokens in (1, 16, 512):
        blocks = torch.randperm(-(-tokens // BLOCK_SIZE), dtype=torch.int32).view(1, -1)
        batch = AttentionBatch.plan([tokens], [tokens], blocks, BLOCK_SIZE)
        kv = torch.zeros(blocks.numel(), KV_HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
        q, k, v = (torch.randn(tokens, heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        norm = torch.ones(HEAD_DIM, dtype=dtype)
        angles = torch.randn(tokens, HEAD_DIM // 2)
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)

        def run(layer: int, q=q, k=k, v=v, kv=kv, batch=batch, cos_sin=cos_sin, norm=norm) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return rope_and_cache(q, k, v, cos_sin, kv, layer, batch, q_norm=norm, k_norm=norm, eps=1e-6)

        yield BenchCase(
            op="rope_kv",
            shape=f"{tokens} tokens, norms",
            dtype=dtype,
            run=cycling(run, range(LAYERS)),
            num_bytes=(2 * q.numel() + 5 * k.numel()) * dtype.itemsize + cos_sin.nbytes,
        )

"""Attention at the shapes of a small model: 16 query heads, 8 KV heads, 14 layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.native.memory import empty_on_huge_pages
from baton.kernels.roofline import BenchCase, cycling

from . import AttentionBatch, paged_attention

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK_SIZE = 16, 8, 64, 14, 16
SHAPES = {  # name: (query tokens, context) of each sequence
    "decode 1 x 128": [(1, 128)],
    "decode 1 x 2048": [(1, 2048)],
    "decode 16 x 512": [(1, 512)] * 16,
    "prefill 1 x 128": [(128, 128)],
    "prefill 8 x 512": [(512, 512)] * 8,
    "prefill 1 x 2048": [(2048, 2048)],
    "chunk 256 after 1792": [(256, 2048)],
}


def cases() -> Iterator[BenchCase]:
    for name, sequences in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            yield case(name, sequences, dtype)


def case(name: str, sequences: list[tuple[int, int]], dtype: torch.dtype) -> BenchCase:
    query_lens, seq_lens = zip(*sequences, strict=True)
    per_sequence = -(-max(seq_lens) // BLOCK_SIZE)
    blocks = torch.randperm(len(sequences) * per_sequence, dtype=torch.int32)
    batch = AttentionBatch.plan(query_lens, seq_lens, blocks.view(len(sequences), per_sequence), BLOCK_SIZE)
    kv = empty_on_huge_pages((len(blocks), KV_HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM), dtype).normal_()
    q = torch.randn(batch.num_tokens, HEADS, HEAD_DIM).to(dtype)
    pairs = sum(query * context - query * (query - 1) // 2 for query, context in sequences)
    values = 2 * q.numel() + 2 * sum(seq_lens) * KV_HEADS * HEAD_DIM
    return BenchCase(
        op="attention",
        shape=name,
        dtype=dtype,
        run=cycling(lambda layer: paged_attention(q, kv, layer, batch, scale=HEAD_DIM**-0.5), range(LAYERS)),
        num_bytes=values * dtype.itemsize,
        flop=4.0 * pairs * HEADS * HEAD_DIM,
    )

"""Benchmark of latent attention at the sizes of DeepSeek-V2-Lite, and of its write into the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from baton.kernels.native import empty_on_huge_pages
from baton.kernels.roofline import BenchCase, cycling

from . import AttentionBatch, UpProjection, latent_and_cache, mla_attention, prepare

HEADS, RANK, ROPE, NOPE, VALUE, BLOCK_SIZE = 16, 512, 64, 128, 128, 16
MOST_DRAFTED = 8  # query tokens of a decode with drafts
LAYERS = 9  # so many that their latents do not fit in a hardware cache
SCALE = (NOPE + ROPE) ** -0.5

SMALL_STEPS = {
    "decode 1 x 128": [(1, 128)],
    "prefill 1 x 128": [(128, 128)],
}  # (query tokens, context) of each sequence
LARGE_STEPS = {
    "decode 1 x 1k": [(1, 1024)],
    "decode 1 x 32k": [(1, 32768)],
    "decode 16 x 1k": [(1, 1024)] * 16,
    "drafts, 4 tokens of 16 x 1k": [(4, 1024)] * 16,
    "decode 64 x 1k": [(1, 1024)] * 64,
    "drafts, 4 tokens of 64 x 1k": [(4, 1024)] * 64,
    "decode 64 x 4k": [(1, 4096)] * 64,
    "drafts, 4 tokens of 64 x 4k": [(4, 4096)] * 64,
    "decode 256 x 1k": [(1, 1024)] * 256,
    "decode 64 of 64 to 8k": [(1, 64 + 128 * index) for index in range(64)],
    "chunk 64 after 16k": [(64, 16448)],
    "prefill 1 x 8k": [(8192, 8192)],
    "prefill 4 x 4k": [(4096, 4096)] * 4,
    "chunk 16k after 16k": [(16384, 32768)],
}


def cases(device: torch.device) -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    steps = LARGE_STEPS if device.type == "cuda" else SMALL_STEPS
    for name, sequences in steps.items():
        yield attention_case(name, sequences, dtype, device)
    for num_tokens in (1, 256, 8192) if device.type == "cuda" else (1, 64):
        yield write_case(num_tokens, dtype, device)


def attention_case(name: str, sequences: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> BenchCase:
    """Return a case. Its FLOP count is that of the cheaper form, absorbed or expanded."""
    batch, kv, q = step(sequences, dtype, device)
    up = UpProjection(torch.randn(HEADS * (NOPE + VALUE), RANK, dtype=dtype, device=device) / 20, HEADS, NOPE, VALUE)
    prepared = prepare(batch, num_heads=HEADS, head_dim=NOPE + ROPE)
    pairs = sum(query * context - query * (query - 1) // 2 for query, context in sequences)
    keys = sum(context for _, context in sequences)
    expand = 2 * RANK * (NOPE + VALUE)  # per token and head: its key and value, or its query and output
    absorbed = pairs * 2 * (2 * RANK + ROPE) + batch.num_tokens * expand
    expanded = pairs * 2 * (NOPE + ROPE + VALUE) + keys * expand
    values = q.numel() + batch.num_tokens * HEADS * VALUE + keys * (RANK + ROPE) + up.weight.numel()
    return BenchCase(
        op="mla",
        shape=name,
        dtype=dtype,
        device=device,
        run=cycling(lambda layer: mla_attention(q, kv, layer, prepared, up, scale=SCALE), range(LAYERS)),
        num_bytes=values * dtype.itemsize,
        flop=float(HEADS * min(absorbed, expanded)),
    )


def write_case(num_tokens: int, dtype: torch.dtype, device: torch.device) -> BenchCase:
    batch, kv, q = step([(num_tokens, num_tokens)], dtype, device)
    compressed = torch.randn(num_tokens, RANK + ROPE, dtype=dtype, device=device)
    norm = torch.ones(RANK, dtype=dtype, device=device)
    cos_sin = torch.randn(num_tokens, ROPE, device=device)

    def run(layer: int) -> None:
        latent_and_cache(q[..., NOPE:], compressed, norm, cos_sin, kv, layer, batch, eps=1e-6)

    values = 2 * num_tokens * (HEADS * ROPE + RANK + ROPE)
    return BenchCase(
        op="mla",
        shape=f"write {num_tokens}",
        dtype=dtype,
        device=device,
        run=cycling(run, range(LAYERS)),
        num_bytes=values * dtype.itemsize + cos_sin.nbytes,
    )


def step(
    sequences: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> tuple[AttentionBatch, Tensor, Tensor]:
    """Return batch, kv and q of a step with sequences (query tokens, context), whose blocks are shuffled."""
    query_lens, seq_lens = zip(*sequences, strict=True)
    per_sequence = -(-max(seq_lens) // BLOCK_SIZE)
    blocks = torch.randperm(len(sequences) * per_sequence, dtype=torch.int32, device=device)
    batch = AttentionBatch.plan(query_lens, seq_lens, blocks.view(len(sequences), per_sequence), BLOCK_SIZE)
    batch = dataclasses.replace(batch, drafted=1 < batch.max_query_len <= MOST_DRAFTED)
    shape = (len(blocks), 1, LAYERS, 1, BLOCK_SIZE, RANK + ROPE)
    kv = empty_on_huge_pages(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)
    q = torch.randn(batch.num_tokens, HEADS, NOPE + ROPE, dtype=dtype, device=device)
    return batch, kv.normal_(), q

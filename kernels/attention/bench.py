"""Benchmark of attention at the shapes of models: a small one on a CPU, Qwen3's on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from baton.kernels.native import empty_on_huge_pages
from baton.kernels.roofline import BenchCase, cycling

from . import AttentionBatch, AttentionRule, paged_attention, prepare

BLOCK_SIZE = 16
FEW_QUERIES = 4  # steps with at most this many queries per sequence count as decodes with drafts


@dataclass(frozen=True)
class AttentionModel:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int  # so many that their keys and values do not fit in a hardware cache


SMALL = AttentionModel(16, 8, 64, num_layers=14)
QWEN3_06B = AttentionModel(16, 8, 128, num_layers=28)
QWEN3_8B = AttentionModel(32, 8, 128, num_layers=36)
QWEN3_30B = AttentionModel(32, 4, 128, num_layers=48)

SMALL_STEPS = {  # name: (query tokens, context) of each sequence
    "decode 1 x 128": [(1, 128)],
    "decode 1 x 2048": [(1, 2048)],
    "decode 16 x 512": [(1, 512)] * 16,
    "prefill 1 x 128": [(128, 128)],
    "prefill 8 x 512": [(512, 512)] * 8,
    "prefill 1 x 2048": [(2048, 2048)],
    "chunk 256 after 1792": [(256, 2048)],
}
LARGE_STEPS = {
    "0.6b decode 1 x 128": (QWEN3_06B, [(1, 128)]),
    "0.6b decode 1 x 1k": (QWEN3_06B, [(1, 1024)]),
    "0.6b decode 256 x 1k": (QWEN3_06B, [(1, 1024)] * 256),
    "8b decode 1 x 1k": (QWEN3_8B, [(1, 1024)]),
    "8b drafts, 4 tokens of 1 x 1k": (QWEN3_8B, [(4, 1024)]),
    "8b decode 1 x 32k": (QWEN3_8B, [(1, 32768)]),
    "8b decode 64 x 4k": (QWEN3_8B, [(1, 4096)] * 64),
    "8b decode 256 x 1k": (QWEN3_8B, [(1, 1024)] * 256),
    "8b decode 64 of 64 to 8k": (QWEN3_8B, [(1, 64 + 128 * index) for index in range(64)]),
    **{
        f"{name} {kind}64 x 1k": (model, [(queries, 1024)] * 64)
        for name, model in (("0.6b", QWEN3_06B), ("8b", QWEN3_8B), ("30b", QWEN3_30B))
        for kind, queries in (("decode ", 1), ("drafts, 4 tokens of ", 4))
    },
    "8b prefill 1 x 8k": (QWEN3_8B, [(8192, 8192)]),
    "8b prefill 4 x 4k": (QWEN3_8B, [(4096, 4096)] * 4),
    "8b prefill 16 x 1k": (QWEN3_8B, [(1024, 1024)] * 16),
    "8b chunk 16k after 16k": (QWEN3_8B, [(16384, 32768)]),
    "8b 64 x 1k and chunk 512 after 4k": (QWEN3_8B, [(1, 1024)] * 64 + [(512, 4608)]),
    "30b decode 1 x 32k": (QWEN3_30B, [(1, 32768)]),
    "30b decode 64 x 4k": (QWEN3_30B, [(1, 4096)] * 64),
}
IN_8_BITS = (
    "8b decode 64 x 1k",
    "8b drafts, 4 tokens of 64 x 1k",
    "8b decode 64 x 4k",
    "8b decode 256 x 1k",
    "8b prefill 1 x 8k",
)  # measured with such a cache as well


def cases(device: torch.device) -> Iterator[BenchCase]:
    if device.type == "cuda":
        for name, (model, sequences) in LARGE_STEPS.items():
            yield case(name, model, sequences, torch.bfloat16, device)
        for name in IN_8_BITS:
            yield case(f"{name}, KV in 8 bits", *LARGE_STEPS[name], torch.bfloat16, device, torch.float8_e4m3fn)
        return
    for name, sequences in SMALL_STEPS.items():
        for dtype in (torch.bfloat16, torch.float32):
            yield case(name, SMALL, sequences, dtype, device)


def case(
    name: str,
    model: AttentionModel,
    sequences: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> BenchCase:
    batch, kv, q = step(model, sequences, dtype, device, kv_dtype)
    rule = AttentionRule(model.head_dim**-0.5)
    kv_values = 2 * sum(context for _, context in sequences) * model.num_kv_heads * model.head_dim
    pairs = sum(query * context - query * (query - 1) // 2 for query, context in sequences)
    return BenchCase(
        op="attention",
        shape=name,
        dtype=dtype,
        device=device,
        run=cycling(lambda layer: paged_attention(q, kv, layer, batch, rule), range(model.num_layers)),
        num_bytes=2 * q.nbytes + kv_values * kv.itemsize,
        flop=4.0 * pairs * model.num_heads * model.head_dim,
    )


def step(
    model: AttentionModel,
    sequences: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> tuple[AttentionBatch, Tensor, Tensor]:
    """Return batch, kv and q of a step with sequences (query tokens, context), whose blocks are shuffled.

    With `kv_dtype`, which must be 8 bits wide, the cache holds random finite values.
    """
    query_lens, seq_lens = zip(*sequences, strict=True)
    lengths = [-(-context // BLOCK_SIZE) for context in seq_lens]
    blocks = torch.randperm(sum(lengths), dtype=torch.int32, device=device)
    tables = pad_sequence(list(blocks.split(lengths)), batch_first=True)
    batch = AttentionBatch.plan(query_lens, seq_lens, tables, BLOCK_SIZE)
    shape = (len(blocks), model.num_kv_heads, model.num_layers, 2, BLOCK_SIZE, model.head_dim)
    if kv_dtype is not None:
        kv = torch.randint(0, 0x70, shape, dtype=torch.uint8, device=device).view(kv_dtype)
    elif device.type == "cpu":
        kv = empty_on_huge_pages(shape, dtype).normal_()
    else:
        kv = torch.empty(shape, dtype=dtype, device=device).normal_()
    q = torch.randn(batch.num_tokens, model.num_heads, model.head_dim, dtype=dtype, device=device)
    batch = dataclasses.replace(batch, drafted=1 < batch.max_query_len <= FEW_QUERIES)
    return prepare(batch, kv, num_heads=model.num_heads), kv, q

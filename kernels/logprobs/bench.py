"""Benchmark of log-probabilities of sampled and of best tokens: every logit must be read once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import token_logprobs

CPU_SHAPES = ((16, 8_192), (16, 152_064))  # rows, vocabulary
GPU_SHAPES = ((1, 151_936), (64, 151_936), (256, 151_936))


def cases(device: torch.device) -> Iterator[BenchCase]:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for rows, vocab_size in GPU_SHAPES if on_gpu else CPU_SHAPES:
        logits_bytes = rows * vocab_size * dtype.itemsize
        copies = min(16, copies_beyond_caches(logits_bytes))
        logits = [torch.randn(rows, vocab_size, device=device).to(dtype) for _ in range(copies)]
        token_ids = torch.randint(vocab_size, (rows,), device=device)
        for k in (0, 20):
            yield BenchCase(
                op="logprobs",
                shape=f"{rows} x {vocab_size} top {k}",
                dtype=dtype,
                device=device,
                run=cycling(lambda row, token_ids=token_ids, k=k: token_logprobs(row, token_ids, k), logits),
                num_bytes=logits_bytes,
            )

"""Benchmark of embedding look-ups: every row is read once and written once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, cycling

from . import embedding

BATCHES = 8  # batches of token ids that a case cycles through
ON_CPU = ((8192, 1024, 1), (8192, 1024, 512))  # vocabulary, hidden size, tokens
ON_GPU = ((151_936, 1024, 1), (151_936, 4096, 64), (151_936, 4096, 1024), (151_936, 4096, 16384))


def cases(device: torch.device) -> Iterator[BenchCase]:
    dtype = torch.bfloat16
    for vocab_size, hidden_size, tokens in ON_GPU if device.type == "cuda" else ON_CPU:
        weight = torch.randn(vocab_size, hidden_size, dtype=dtype, device=device)
        ids = [torch.randint(vocab_size, (tokens,), dtype=torch.int32, device=device) for _ in range(BATCHES)]
        yield BenchCase(
            op="embedding",
            shape=f"{tokens} of {vocab_size} x {hidden_size}",
            dtype=dtype,
            device=device,
            run=cycling(lambda token_ids, weight=weight: embedding(token_ids, weight), ids),
            num_bytes=ids[0].nbytes + 2 * tokens * hidden_size * dtype.itemsize,
        )

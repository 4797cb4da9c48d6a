"""Draws with and without truncation: every logit must be read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import Penalties, SamplingBatch, TokenHistory, sample

SPREAD = 3.0  # standard deviation of the logits: some thousand tokens share the probability
HISTORY = 2048  # tokens that penalties look at


def cases() -> Iterator[BenchCase]:
    for rows, vocab_size in ((16, 8_192), (1, 152_064), (16, 152_064)):
        logits_bytes = rows * vocab_size * 4
        copies = min(16, copies_beyond_caches(logits_bytes))
        logits = [torch.randn(rows, vocab_size) * SPREAD for _ in range(copies)]
        for name, batch in _batches(rows, vocab_size).items():
            yield BenchCase(
                op="sampling",
                shape=f"{rows} x {vocab_size} {name}",
                dtype=torch.float32,
                run=cycling(lambda row, batch=batch: sample(row, batch), logits),
                num_bytes=logits_bytes,
            )


def _batches(rows: int, vocab_size: int) -> dict[str, SamplingBatch]:
    random = torch.ones(rows)
    greedy = SamplingBatch(seeds=torch.arange(rows), positions=torch.full((rows,), HISTORY))
    drawn = replace(greedy, temperature=random)
    penalties = Penalties(torch.arange(rows), random, random, random)
    history = TokenHistory(torch.randint(vocab_size, (rows, HISTORY)), torch.arange(rows), torch.full((rows,), 64))
    return {
        "greedy": greedy,
        "random": drawn,
        "top-k": replace(drawn, top_k=torch.full((rows,), 50)),
        "top-p": replace(drawn, top_p=torch.full((rows,), 0.95)),
        "penalties": replace(drawn, penalties=penalties, history=history),
    }

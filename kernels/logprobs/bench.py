"""Log-probabilities of sampled and of best tokens: every logit must be read once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import token_logprobs


def cases() -> Iterator[BenchCase]:
    for rows, vocab_size in ((16, 8_192), (16, 152_064)):
        logits_bytes = rows * vocab_size * 4
        copies = min(16, copies_beyond_caches(logits_bytes))
        logits = [torch.randn(rows, vocab_size) for _ in range(copies)]
        token_ids = torch.randint(vocab_size, (rows,))
        for k in (0, 20):
            yield BenchCase(
                op="logprobs",
                shape=f"{rows} x {vocab_size} top {k}",
                dtype=torch.float32,
                run=cycling(lambda row, token_ids=token_ids, k=k: token_logprobs(row, token_ids, k), logits),
                num_bytes=logits_bytes,
            )

"""Benchmark of draws with and without truncation: every logit must be read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.roofline import BenchCase, copies_beyond_caches, cycling

from . import Penalties, SamplingBatch, TokenHistory, encode_row, sample, sample_rows

SPREAD = 3.0  # standard deviation of the logits: a few thousand tokens share the probability
HISTORY = 2048  # tokens that penalties consider
CPU_SHAPES = ((16, 8_192), (1, 152_064), (16, 152_064))  # rows, vocabulary
GPU_SHAPES = ((1, 151_936), (64, 151_936), (256, 151_936), (512, 151_936))


def cases(device: torch.device) -> Iterator[BenchCase]:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for rows, vocab_size in GPU_SHAPES if on_gpu else CPU_SHAPES:
        logits_bytes = rows * vocab_size * dtype.itemsize
        copies = min(16, copies_beyond_caches(logits_bytes))
        logits = [(torch.randn(rows, vocab_size, device=device) * SPREAD).to(dtype) for _ in range(copies)]
        for name, draw in _draws(rows, vocab_size, device).items():
            yield BenchCase(
                op="sampling",
                shape=f"{rows} x {vocab_size} {name}",
                dtype=dtype,
                device=device,
                run=cycling(draw, logits),
                num_bytes=logits_bytes,
            )


@dataclass(frozen=True)
class _Request:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def _draws(rows: int, vocab_size: int, device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    slots = torch.arange(rows, device=device)
    positions = torch.full_like(slots, HISTORY)

    def plain(**numbers: float) -> Callable[[Tensor], Tensor]:
        request = _Request(**numbers)  # type: ignore[arg-type]  # top_k is given as an integer
        words = [torch.from_numpy(encode_row(request, seed=seed, prompt_len=64)) for seed in range(rows)]
        table = torch.stack(words).to(device)
        return lambda logits: sample_rows(logits, table, slots, positions)

    ones = torch.ones(rows, device=device)
    tokens = torch.randint(vocab_size, (rows, HISTORY), device=device)
    penalties = SamplingBatch(
        seeds=slots,
        positions=positions,
        temperature=ones,
        penalties=Penalties(slots, ones, ones, ones),
        history=TokenHistory(tokens, slots, torch.full_like(slots, 64)),
    )
    return {
        "greedy": plain(temperature=0.0),
        "random": plain(),
        "top-k": plain(top_k=50),
        "top-p": plain(top_p=0.95),
        "min-p": plain(min_p=0.05),
        "penalties": lambda logits: sample(logits, penalties),
    }

"""Sequences and queries for tests of prefill attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch

from .kernel_checks import PagedSequences

LAYER = 1
MIXED = ([1, 1, 5, 40, 70], [70, 1, 90, 40, 130])  # single tokens, a chunk after a prefix, a prompt, a second chunk


def on_device(sequences: PagedSequences, device: torch.device) -> PagedSequences:
    tensors = {name: value.to(device) for name, value in vars(sequences.batch).items() if isinstance(value, Tensor)}
    return replace(sequences, kv=sequences.kv.to(device), batch=replace(sequences.batch, **tensors))


def queries(batch: AttentionBatch, num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch.num_tokens, num_heads, dim, generator=generator).to(batch.slots.device, dtype)

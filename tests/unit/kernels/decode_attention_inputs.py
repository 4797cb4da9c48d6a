"""Sequences and queries for tests of decode attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch

from .kernel_checks import PagedSequences, paged_sequences

LAYER = 1
RAGGED = [37, 1, 16, 150, 17, 64]


def decodes(device: torch.device, seq_lens: Sequence[int] = RAGGED, **shape: object) -> PagedSequences:
    sequences = paged_sequences([1] * len(seq_lens), seq_lens, **shape)  # type: ignore[arg-type]
    return PagedSequences(sequences.kv.to(device), on_device(sequences.batch, device), sequences.query_lens)


def on_device(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **{name: value.to(device) for name, value in tensors.items()})


def queries(
    sequences: PagedSequences, num_heads: int, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> Tensor:
    """`head_dim`: where it is not the width of the cache."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(sequences.batch.num_tokens, num_heads, head_dim or sequences.kv.shape[-1], generator=generator)
    return q.to(sequences.kv.device, dtype or sequences.kv.dtype)

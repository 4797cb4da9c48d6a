"""Queries and ragged lengths that tests of attention share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.kernels.attention import AttentionRule, paged_attention
from baton.kernels.kv_rows import kv_rows

from .kernel_checks import PagedSequences

LAYER = 1


def queries(sequences: PagedSequences, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sequences.batch.num_tokens, num_heads, head_dim, generator=generator).to(dtype)


def attend(q: Tensor, sequences: PagedSequences, window: int | None = None, **rule: Any) -> Tensor:
    out = torch.full((*q.shape[:2], kv_rows(sequences.kv, q.shape[2]).value_dim), float("nan"), dtype=q.dtype)
    made = AttentionRule(q.shape[2] ** -0.5, window=window, **rule)
    result = paged_attention(q, sequences.kv, LAYER, sequences.batch, made, out=out)
    assert result is out
    return out

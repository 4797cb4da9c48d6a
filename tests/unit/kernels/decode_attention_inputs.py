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


def drafted(
    device: torch.device,
    query_lens: Sequence[int] = (3, 1, 4, 2, 4, 1),
    seq_lens: Sequence[int] = RAGGED,
    *,
    most: int = 4,
    padding: tuple[int, int] = (0, 0),
    **shape: object,
) -> PagedSequences:
    """Return sequences with up to `most` queries each, with `padding` sequences and tokens, as in a captured step."""
    sequences = paged_sequences(query_lens, seq_lens, **shape)  # type: ignore[arg-type]
    batch = sequences.batch
    more_seqs, more_tokens = padding
    ends = batch.query_start[-1:].expand(more_seqs)
    tables = torch.nn.functional.pad(batch.block_tables, (0, 0, 0, more_seqs))
    batch = dataclasses.replace(
        batch,
        query_start=torch.cat([batch.query_start, ends]),
        seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, more_seqs)),
        block_tables=tables,
        positions=torch.nn.functional.pad(batch.positions, (0, more_tokens)),
        slots=torch.nn.functional.pad(batch.slots, (0, more_tokens), value=-1),
        max_query_len=most,
        num_decodes=0,
        drafted=True,
    )
    return PagedSequences(sequences.kv.to(device), on_device(batch, device), query_lens)


def on_device(batch: AttentionBatch, device: torch.device) -> AttentionBatch:
    tensors = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **{name: value.to(device) for name, value in tensors.items()})


def queries(
    sequences: PagedSequences, num_heads: int, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> Tensor:
    """Return random queries. `head_dim` is needed only if it differs from the width of the cache."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(sequences.batch.num_tokens, num_heads, head_dim or sequences.kv.shape[-1], generator=generator)
    return q.to(sequences.kv.device, dtype or sequences.kv.dtype)

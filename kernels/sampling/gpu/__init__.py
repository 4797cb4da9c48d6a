"""Sampling on a GPU. As on a CPU, it draws the same tokens as the reference, except at the border of top-p.

    logits ──edit_logits──> truncate ──> draw_tokens ──> tokens        two kernels; edits only if requested

Nothing here synchronizes with the device, and CUDA graphs may capture `sample_rows`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ..batch import ROW_WORDS, SamplingBatch, encode_batch
from ..reference import edit_logits as edit_as_reference
from ..reference import history_of
from .draw import draw_tokens
from .logit_edits import keep_allowed, penalize
from .truncation import truncate

__all__ = ["edit_logits", "sample", "sample_rows"]


def sample_rows(logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """See `baton.kernels.sampling.sample_rows`. Raises `ValueError` for tensors that the kernels cannot read."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    if table.dtype != torch.int32 or table.shape[1] != ROW_WORDS or not table.is_contiguous():
        raise ValueError(f"the table is {table.dtype} {list(table.shape)}: give contiguous int32 [rows, {ROW_WORDS}]")
    for name, tensor in (("rows", rows), ("positions", positions)):
        if tensor.shape != logits.shape[:1] or not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} for logits {list(logits.shape)}: give one a row")
    floors, scoreboards = truncate(logits, table, rows)
    return draw_tokens(logits, table, rows, positions, floors, scoreboards)


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See `baton.kernels.sampling.sample`."""
    words = encode_batch(batch) if batch.words is None else batch.words
    return sample_rows(edit_logits(logits, batch), words, _every_row(len(logits), logits.device), batch.positions)


@functools.lru_cache(maxsize=1024)
def _every_row(num_rows: int, device: torch.device) -> Tensor:
    return torch.arange(num_rows, dtype=torch.int32, device=device)


def edit_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Edit logits as `reference.edit_logits` does, in a float32 copy if a row needs edits.

    Penalties take time for the history, not for the vocabulary.
    """
    if not batch.edits_logits:
        return logits
    edited = logits.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if batch.allowed is not None:
        keep_allowed(edited, batch.allowed)
    edited = edit_as_reference(edited, replace(batch, allowed=None, penalties=None))
    if batch.penalties is not None:
        penalize(edited, batch.penalties, history_of(batch), batch.positions)
    return edited

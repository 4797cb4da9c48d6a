"""Sampling in C++ (`native/sampling.cpp`). It draws the same tokens as the reference, except at the border of top-p.

The last token within top-p depends on a sum of exponentials, which is rounded differently. A draw differs only if that
sum is within rounding error of top-p, and the token in question wins.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from baton.kernels import native

from . import reference
from .batch import AllowedTokens, Penalties, SamplingBatch, TokenHistory


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    draw = kernel_of_draws()
    if draw is None or logits.dtype != torch.float32:
        return reference.sample(logits, batch)
    logits = edit_logits(logits, batch)
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64)
    draw(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        *(_pointer(name, getattr(batch, name), dtype, num_rows) for name, dtype in _PER_ROW.items()),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


_PER_ROW = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
}


def edit_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Edit logits as `reference.edit_logits` does. Penalties take time for the history, not for the vocabulary."""
    if batch.allowed is not None:
        logits = _keep_allowed(logits, batch.allowed)
        batch = replace(batch, allowed=None)
    penalize = kernel_of_penalties()
    if batch.penalties is None or penalize is None or logits.dtype != torch.float32:
        return reference.edit_logits(logits, batch)
    edited = reference.edit_logits(logits, replace(batch, penalties=None))
    if edited is logits:
        edited = logits.clone(memory_format=torch.contiguous_format)
    _penalize(edited, batch.penalties, reference.history_of(batch), batch.positions, penalize)
    return edited


def _keep_allowed(logits: Tensor, allowed: AllowedTokens) -> Tensor:
    """Return a masked copy. numpy unpacks the bits in one call, for which torch would need thirty-two."""
    logits = logits.clone(memory_format=torch.contiguous_format)
    packed = allowed.bits.contiguous().numpy().view(np.uint8)
    bits = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")
    logits[allowed.rows] = logits[allowed.rows].masked_fill_(torch.from_numpy(bits == 0), -torch.inf)
    return logits


def _penalize(
    logits: Tensor,
    penalties: Penalties,
    history: TokenHistory,
    positions: Tensor,
    penalize: native.NativeFunction,
) -> None:
    table = history.token_ids
    if table.dtype not in (torch.int32, torch.int64) or table.stride(1) != 1:
        raise ValueError(f"history.token_ids is {table.dtype} with strides {table.stride()}: give int32 or int64 rows")
    if len(positions) and int(positions.max()) > table.shape[1]:
        raise ValueError(f"history.token_ids holds {table.shape[1]} tokens a row, positions reach {positions.max()}")
    count = len(penalties.rows)
    pointers = [
        _pointer("penalties.rows", penalties.rows, torch.int64, count),
        count,
        _pointer("penalties.repetition", penalties.repetition, torch.float32, count),
        _pointer("penalties.presence", penalties.presence, torch.float32, count),
        _pointer("penalties.frequency", penalties.frequency, torch.float32, count),
        table.data_ptr(),
        int(table.dtype == torch.int64),
        table.stride(0),
        _pointer("history.rows", history.rows, torch.int64, len(logits)),
        _pointer("history.prompt_lens", history.prompt_lens, torch.int64, len(logits)),
        _pointer("positions", positions, torch.int64, len(logits)),
    ]
    penalize(logits.data_ptr(), logits.stride(0), logits.shape[1], *pointers)


def _pointer(name: str, numbers: Tensor | None, dtype: torch.dtype, length: int) -> int:
    """Return the address of a vector for C++; 0 for None."""
    if numbers is None:
        return 0
    if numbers.dtype != dtype or numbers.shape != (length,) or not numbers.is_contiguous():
        given = f"{numbers.dtype} {list(numbers.shape)} with strides {numbers.stride()}"
        raise ValueError(f"SamplingBatch.{name} is {given}: give contiguous {dtype} [{length}]")
    return numbers.data_ptr()


@functools.cache
def kernel_of_draws() -> native.NativeFunction | None:
    """Return the function that draws; None without a compiler."""
    pointer, i64 = native.POINTER, native.I64
    return native.function("baton_sample", pointer, i64, i64, i64, *(pointer,) * len(_PER_ROW), pointer, native.INT)


@functools.cache
def kernel_of_penalties() -> native.NativeFunction | None:
    """Return the function that applies penalties; None without a compiler."""
    pointer, i64 = native.POINTER, native.I64
    history = (pointer, native.INT, i64, pointer, pointer, pointer)
    return native.function("baton_penalize", pointer, i64, i64, pointer, i64, pointer, pointer, pointer, *history)

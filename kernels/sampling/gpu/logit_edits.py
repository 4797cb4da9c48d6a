"""Edits of logits before sampling: masks of allowed tokens, and penalties on the tokens of a row's history.

Tokens are counted in a table that is zero before and after. One pass over the history counts. A second pass takes each
count out and sets it to zero; the program that gets a non-zero count changes the logit.

    history    7 9 7 | 7 4        prompt | output
    counts     7: 1 + in prompt   9: in prompt   4: 1                then    7: taken once, other programs get 0
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import AllowedTokens, Penalties, TokenHistory

_IN_PROMPT = tl.constexpr(1 << 30)
ROWS_AT_ONCE = 32  # rows of the table of counts; larger batches are processed in several launches
PROGRAMS = 16  # programs that share the history of a row
_BLOCK = tl.constexpr(256)
_MASK_BLOCK = tl.constexpr(1024)
_NONE = tl.constexpr(-math.inf)


def penalize(logits: Tensor, penalties: Penalties, history: TokenHistory, positions: Tensor) -> None:
    """Apply `penalties` to rows of `logits` [R, V] float32 in place. Does not synchronize with the device.

    Raises `ValueError` if the history's tokens are not int32 or int64 rows.
    """
    table = history.token_ids
    if table.dtype not in (torch.int32, torch.int64) or table.stride(1) != 1:
        raise ValueError(f"history.token_ids is {table.dtype} with strides {table.stride()}: give int32 or int64 rows")
    counts = _counts(logits.device, logits.shape[1])
    for first in range(0, len(penalties.rows), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        arguments = (
            penalties.rows[rows],
            table,
            history.rows,
            history.prompt_lens,
            positions,
            counts,
            table.stride(0),
            table.shape[1],
            logits.shape[1],
        )
        grid = (PROGRAMS, len(penalties.rows[rows]))
        _count[grid](*arguments)
        _apply[grid](
            *arguments,
            logits,
            logits.stride(0),
            penalties.repetition[rows],
            penalties.presence[rows],
            penalties.frequency[rows],
            enable_fp_fusion=False,
        )


@functools.cache
def _counts(device: torch.device, vocab_size: int) -> Tensor:
    """Return the table of counts [ROWS_AT_ONCE, vocab_size] int32, zero between calls, which run one after another."""
    return torch.zeros(ROWS_AT_ONCE, vocab_size, dtype=torch.int32, device=device)


@triton.jit
def _count(
    rows_ptr,  # [P] int64, rows of the logits
    table_ptr,  # [num_rows, capacity]
    table_rows_ptr,  # [R] int64
    prompt_lens_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    counts_ptr,  # [P, V] int32
    table_stride,
    capacity,
    vocab_size,
):
    row = tl.load(rows_ptr + tl.program_id(1))
    history = table_ptr + tl.load(table_rows_ptr + row) * table_stride
    counts = counts_ptr + tl.program_id(1).to(tl.int64) * vocab_size
    prompt_len, length = tl.load(prompt_lens_ptr + row), tl.minimum(tl.load(positions_ptr + row), capacity)
    for start in range(tl.program_id(0) * _BLOCK, length, tl.num_programs(0) * _BLOCK):
        at = start + tl.arange(0, _BLOCK)
        token = tl.load(history + at, at < length, -1)
        known = (token >= 0) & (token < vocab_size)
        tl.atomic_or(counts + token, _IN_PROMPT, known & (at < prompt_len), sem="relaxed")
        tl.atomic_add(counts + token, 1, known & (at >= prompt_len), sem="relaxed")


@triton.jit
def _apply(
    rows_ptr,
    table_ptr,
    table_rows_ptr,
    prompt_lens_ptr,
    positions_ptr,
    counts_ptr,
    table_stride,
    capacity,
    vocab_size,
    logits_ptr,  # [R, V] float32
    logits_stride,
    repetition_ptr,  # [P] float32
    presence_ptr,  # [P] float32
    frequency_ptr,  # [P] float32
):
    index = tl.program_id(1)
    row = tl.load(rows_ptr + index)
    history = table_ptr + tl.load(table_rows_ptr + row) * table_stride
    counts = counts_ptr + index.to(tl.int64) * vocab_size
    logits = logits_ptr + row * logits_stride
    length = tl.minimum(tl.load(positions_ptr + row), capacity)
    repetition = tl.load(repetition_ptr + index)
    presence, frequency = tl.load(presence_ptr + index), tl.load(frequency_ptr + index)
    for start in range(tl.program_id(0) * _BLOCK, length, tl.num_programs(0) * _BLOCK):
        at = start + tl.arange(0, _BLOCK)
        token = tl.load(history + at, at < length, -1)
        known = (token >= 0) & (token < vocab_size)
        count = tl.atomic_xchg(counts + token, 0, known, sem="relaxed")
        mine = known & (count != 0)
        in_output = (count & (_IN_PROMPT - 1)).to(tl.float32)
        logit = tl.load(logits + token, mine, 0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
        logit -= frequency * in_output
        logit -= tl.where(in_output > 0, presence, 0.0)
        tl.store(logits + token, logit, mine)


def keep_allowed(logits: Tensor, allowed: AllowedTokens) -> None:
    """Set tokens of `logits` [R, V] float32 that `allowed` excludes to -inf. Does not synchronize with the device.

    Raises `ValueError` if the bits are not one contiguous int32 word for each 32 tokens.
    """
    bits, (_, vocab_size) = allowed.bits, logits.shape
    num_rows, num_words = len(allowed.rows), -(-vocab_size // 32)
    if bits.dtype != torch.int32 or bits.shape != (num_rows, num_words) or not bits.is_contiguous():
        given = f"{bits.dtype} {list(bits.shape)}"
        raise ValueError(f"AllowedTokens.bits is {given}: give contiguous int32 [{num_rows}, {num_words}]")
    if num_rows:
        grid = (-(-vocab_size // _MASK_BLOCK.value), num_rows)
        keep_allowed_kernel[grid](allowed.rows, bits, logits, num_words, logits.stride(0), vocab_size)


@triton.jit
def keep_allowed_kernel(
    rows_ptr,  # [A] int64, rows of the logits
    bits_ptr,  # [A, num_words] int32
    logits_ptr,  # [R, V] float32
    num_words,
    logits_stride,
    vocab_size,
):
    index = tl.program_id(1)
    token = tl.program_id(0) * _MASK_BLOCK + tl.arange(0, _MASK_BLOCK)
    inside = token < vocab_size
    words = tl.load(bits_ptr + index.to(tl.int64) * num_words + token // 32, inside, -1)
    banned = (words >> (token % 32)) & 1 == 0
    row = tl.load(rows_ptr + index).to(tl.int64)
    tl.store(logits_ptr + row * logits_stride + token, _NONE, inside & banned)

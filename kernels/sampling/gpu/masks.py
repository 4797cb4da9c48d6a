"""Rows that may draw certain tokens only: the others' logits are written over, none is read."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..batch import AllowedTokens

_BLOCK = tl.constexpr(1024)
_NONE = tl.constexpr(-math.inf)


def keep_allowed(logits: Tensor, allowed: AllowedTokens) -> None:
    """Changes the rows of `logits` `[R, V]` float32 that `allowed` names. Waits for no device.

    Raises `ValueError` where the bits are not one contiguous int32 word for each 32 tokens.
    """
    bits, (_, vocab_size) = allowed.bits, logits.shape
    num_rows, num_words = len(allowed.rows), -(-vocab_size // 32)
    if bits.dtype != torch.int32 or bits.shape != (num_rows, num_words) or not bits.is_contiguous():
        given = f"{bits.dtype} {list(bits.shape)}"
        raise ValueError(f"AllowedTokens.bits is {given}: give contiguous int32 [{num_rows}, {num_words}]")
    if num_rows:
        grid = (-(-vocab_size // _BLOCK.value), num_rows)
        _keep_allowed[grid](allowed.rows, bits, logits, num_words, logits.stride(0), vocab_size)


@triton.jit
def _keep_allowed(
    rows_ptr,  # [A] int64, rows of the logits
    bits_ptr,  # [A, num_words] int32
    logits_ptr,  # [R, V] float32
    num_words,
    logits_stride,
    vocab_size,
):
    index = tl.program_id(1)
    token = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    inside = token < vocab_size
    words = tl.load(bits_ptr + index.to(tl.int64) * num_words + token // 32, inside, -1)
    banned = (words >> (token % 32)) & 1 == 0
    row = tl.load(rows_ptr + index).to(tl.int64)
    tl.store(logits_ptr + row * logits_stride + token, _NONE, inside & banned)

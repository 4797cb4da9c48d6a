"""Log-probabilities in C++ (`native/logprobs.cpp`): two passes over a row, without temporaries of its size."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baton.kernels import native

from . import reference


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernel = native_kernel()
    if kernel is None or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return reference.token_logprobs(logits, token_ids, k)
    num_rows, vocab_size = logits.shape
    token_ids = token_ids.to(torch.int64).contiguous()
    if num_rows and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise IndexError(f"token ids from {token_ids.min()} to {token_ids.max()}: the logits have {vocab_size} tokens")
    chosen = torch.empty(num_rows)
    rank = torch.empty(num_rows, dtype=torch.int64)
    top_ids = torch.empty(num_rows, k, dtype=torch.int64)
    top_logprobs = torch.empty(num_rows, k)
    kernel(
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        vocab_size,
        token_ids.data_ptr(),
        k,
        chosen.data_ptr(),
        rank.data_ptr(),
        top_ids.data_ptr(),
        top_logprobs.data_ptr(),
        torch.get_num_threads(),
    )
    return chosen, rank, top_ids, top_logprobs


@functools.cache
def native_kernel() -> native.NativeFunction | None:
    """Return the compiled function; None without a compiler."""
    pointer, i64 = native.POINTER, native.I64
    outputs = (pointer, pointer, pointer, pointer)
    return native.function("baton_token_logprobs", pointer, i64, i64, i64, pointer, i64, *outputs, native.INT)

"""Paged attention in C++ (`native/attention.cpp`)."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.kv_rows import KVRows, kv_rows

from . import reference
from .rule import AttentionRule


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    rule: AttentionRule,
    *,
    out: Tensor | None,
) -> Tensor:
    kernel, rows = _kernel(), kv_rows(kv, q.shape[2])
    if kernel is None or rule.is_scaled or not _fits(q, kv, rows):
        return reference.paged_attention(q, kv, layer, batch, rule, out=out)
    num_tokens, num_heads, dim = q.shape
    if q.stride(2) != 1 or q.stride(1) != dim:
        q = q.contiguous()
    if out is None:
        out = torch.empty((num_tokens, num_heads, rows.value_dim), dtype=q.dtype)
    block_stride, head_stride = kv.stride()[:2]
    tables = batch.block_tables
    sizes = _SIZES(
        *(batch.num_seqs, num_heads, kv.shape[1], dim, rows.value_dim, kv.shape[4]),
        *(q.stride(0), num_heads * rows.value_dim, tables.stride(0)),
        *(block_stride, head_stride, rows.token_stride, rows.to_value, rule.window or 0, num_tokens),
    )
    kernel(
        native.DTYPE_NUMBER[q.dtype],
        q.data_ptr(),
        kv.data_ptr() + layer * kv.stride(2) * kv.element_size(),
        out.data_ptr(),
        sizes,
        batch.query_start.data_ptr(),
        batch.seq_lens.data_ptr(),
        tables.data_ptr(),
        0 if batch.table_rows is None else batch.table_rows.data_ptr(),
        0 if rule.sinks is None else rule.sinks.data_ptr(),
        rule.scale,
        rule.cap,
        torch.get_num_threads(),
    )
    return out


_SIZES = ctypes.c_int64 * 15  # the integers of AttentionBatch in native/attention.cpp
GRANULE = 16  # head dimensions and block sizes must be multiples of this: the width of vectors
MAX_GROUP = 128  # query heads of one KV head: rows of the kernel's tile


def _fits(q: Tensor, kv: Tensor, rows: KVRows) -> bool:
    """Return whether the C++ function supports these shapes and dtypes; the reference computes all others."""
    return (
        q.dtype == kv.dtype
        and q.dtype in native.DTYPE_NUMBER
        and q.shape[2] % GRANULE == 0
        and kv.shape[4] % GRANULE == 0
        and q.shape[1] // kv.shape[1] <= MAX_GROUP
        and rows.value_dim % GRANULE == 0
        and kv.stride()[4:] == (rows.token_stride, 1)
    )


@functools.cache
def _kernel() -> native.NativeFunction | None:
    pointer = native.POINTER
    tensors = (pointer, pointer, pointer, ctypes.POINTER(ctypes.c_int64), pointer, pointer, pointer, pointer, pointer)
    return native.function("baton_paged_attention", native.INT, *tensors, native.F32, native.F32, native.INT)

"""Head norm, rotation and KV write in C++ (`native/rope_kv.cpp`)."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.kv_rows import KVRows, kv_rows

from . import reference


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    *,
    rotary_dim: int | None = None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    kernel, rows = _kernel(), kv_rows(kv, q.shape[2])
    number = native.DTYPE_NUMBER.get(q.dtype)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    unscaled = k_scale is None and v_scale is None
    if kernel is None or number is None or not (unscaled and _fits(q, k, v, cos_sin, kv, rows, q_norm, k_norm)):
        return reference.rope_and_cache(
            q, k, v, cos_sin, kv, layer, batch, rotary_dim=rotary_dim, q_norm=q_norm, k_norm=k_norm, eps=eps, **scales
        )
    block_stride, head_stride = kv.stride()[:2]
    sizes = _SIZES(
        *(q.shape[0], q.shape[1], k.shape[1], q.shape[2], rows.value_dim),
        *(rotary_dim or cos_sin.shape[1], cos_sin.shape[1] // 2, kv.shape[4]),
        *(q.stride(0), k.stride(0), v.stride(0)),
        *(block_stride, head_stride, rows.token_stride, rows.to_value),
    )
    kernel(
        number,
        number if q_norm is None else native.DTYPE_NUMBER[q_norm.dtype],
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        kv.data_ptr() + layer * kv.stride(2) * kv.element_size(),
        sizes,
        cos_sin.data_ptr(),
        batch.positions.data_ptr(),
        batch.slots.data_ptr(),
        eps,
        torch.get_num_threads(),
    )
    return q


_SIZES = ctypes.c_int64 * 15  # the integers of RopeBatch in native/rope_kv.cpp


def _fits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    kv: Tensor,
    rows: KVRows,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> bool:
    """Return whether the C++ function supports the tensors: one dtype, contiguous heads, contiguous tables."""
    dim = q.shape[2]
    same_type = k.dtype == v.dtype == kv.dtype == q.dtype and cos_sin.dtype == torch.float32
    norm_types = {norm.dtype for norm in (q_norm, k_norm) if norm is not None}
    same_type &= norm_types in (set(), {q.dtype}, {torch.float32})
    contiguous_heads = all(heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] for heads in (q, k, v))
    return (
        same_type
        and contiguous_heads
        and cos_sin.is_contiguous()
        and kv.stride()[4:] == (rows.token_stride, 1)
        and v.shape[2] == rows.value_dim
        and dim <= MAX_HEAD_DIM
    )


MAX_HEAD_DIM = 512  # as in native/rope_kv.cpp


@functools.cache
def _kernel() -> native.NativeFunction | None:
    pointers = (native.POINTER,) * 6
    tables = (ctypes.POINTER(ctypes.c_int64), native.POINTER, native.POINTER, native.POINTER)
    return native.function("baton_rope_and_cache", native.INT, native.INT, *pointers, *tables, native.F32, native.INT)

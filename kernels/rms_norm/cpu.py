"""RMSNorm in C++ (`native/rms_norm.cpp`)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baton.kernels import native

from . import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    kernel = _kernel()
    number = native.DTYPE_NUMBER.get(x.dtype)
    same_type = weight.dtype in (x.dtype, torch.float32) and (residual is None or residual.dtype == x.dtype)
    if kernel is None or number is None or not same_type:
        return reference.rms_norm(x, weight, eps, residual)
    width = x.shape[-1]
    if weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
        given = "" if residual is None else f" and residual {list(residual.shape)}"
        raise ValueError(
            f"x {list(x.shape)} with weight {list(weight.shape)}{given}: give weight [{width}], residual as x"
        )
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    total = residual_rows = None
    if residual is not None:
        residual_rows = _rows(residual)
        total = torch.empty(x.shape, dtype=x.dtype)
    kernel(
        number,
        native.DTYPE_NUMBER[weight.dtype],
        rows.data_ptr(),
        rows.stride(0),
        0 if residual_rows is None else residual_rows.data_ptr(),
        0 if residual_rows is None else residual_rows.stride(0),
        weight.data_ptr(),
        0 if total is None else total.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        width,
        eps,
        torch.get_num_threads(),
    )
    return out if total is None else (out, total)


def _rows(x: Tensor) -> Tensor:
    """View x as [rows, N] with contiguous rows; copy only where it must."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@functools.cache
def _kernel() -> native.NativeFunction | None:
    pointer, i64, integer = native.POINTER, native.I64, native.INT
    inputs = (integer, integer, pointer, i64, pointer, i64, pointer)
    return native.function("baton_rms_norm", *inputs, pointer, pointer, native.ROWS, i64, native.F32, integer)

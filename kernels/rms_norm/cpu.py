"""RMSNorm in C++ (`native/rms_norm.cpp`)."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from baton.kernels import native

from . import reference
from .reference import Gating


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


def gated_rms_norm(
    x: Tensor, weight: Tensor, gate: Tensor, eps: float, *, gating: Gating, gate_first: bool, out: Tensor | None
) -> Tensor:
    kernel, number = _gated_kernel(), native.DTYPE_NUMBER.get(x.dtype)
    same_type = (
        gate.dtype == x.dtype and (out is None or out.dtype == x.dtype) and weight.dtype in (x.dtype, torch.float32)
    )
    if kernel is None or number is None or not same_type:
        return reference.gated_rms_norm(x, weight, gate, eps, gating=gating, gate_first=gate_first, out=out)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    num_tokens, *heads = x.shape
    weight_stride = weight.stride(0) if weight.dim() == 2 else 0
    kernel(
        number,
        native.DTYPE_NUMBER[weight.dtype],
        gating is Gating.SIGMOID,
        gate_first,
        _SIZES(*heads, x.stride(0), gate.stride(0), out.stride(0), weight_stride),
        *(each.data_ptr() for each in (x, gate, weight, out)),
        num_tokens,
        eps,
        torch.get_num_threads(),
    )
    return out


_SIZES = ctypes.c_int64 * 6  # `GatedSizes` of native/rms_norm.cpp


def _rows(x: Tensor) -> Tensor:
    """View x as [rows, N] with contiguous rows; copy only where it must."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@functools.cache
def _kernel() -> native.NativeFunction | None:
    pointer, i64, integer = native.POINTER, native.I64, native.INT
    inputs = (integer, integer, pointer, i64, pointer, i64, pointer)
    return native.function("baton_rms_norm", *inputs, pointer, pointer, native.ROWS, i64, native.F32, integer)


@functools.cache
def _gated_kernel() -> native.NativeFunction | None:
    pointer, integer = native.POINTER, native.INT
    step = (integer, integer, integer, integer, ctypes.POINTER(ctypes.c_int64))
    return native.function("baton_gated_rms_norm", *step, *(pointer,) * 4, native.ROWS, native.F32, integer)

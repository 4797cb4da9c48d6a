"""The causal convolution in C++ (`native/causal_conv.cpp`)."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.state_batch import StateBatch

from . import reference


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    batch: StateBatch,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
    drafts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.causal_conv.causal_conv`. Uses the reference for float64, or if tensors differ in dtype."""
    kernel, number = _kernel(), native.DTYPE_NUMBER.get(x.dtype)
    others = [part for part in (weight, state, bias, out) if part is not None]
    if kernel is None or number is None or any(part.dtype != x.dtype for part in others):
        return reference.causal_conv(x, weight, state, batch, bias=bias, silu=silu, drafts=drafts, out=out)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    drafts_stride = 0 if drafts is None else drafts.stride(0)
    kernel(
        number,
        batch.words,
        x.shape[0],
        _SIZES(*weight.shape, silu, x.stride(0), state.stride(0), out.stride(0), drafts_stride),
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        state.data_ptr(),
        0 if drafts is None else drafts.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


_SIZES = ctypes.c_int64 * 7  # `ConvSizes` of native/causal_conv.cpp


@functools.cache
def _kernel() -> native.NativeFunction | None:
    numbers = ctypes.POINTER(ctypes.c_int64)
    step = (native.INT, numbers, native.ROWS, numbers)
    return native.function("baton_causal_conv", *step, *(native.POINTER,) * 6, native.INT)

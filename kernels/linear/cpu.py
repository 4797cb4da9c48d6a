"""bfloat16 linear layers on CPUs with AVX512-BF16, and AMX where there is, in C++ (`native/linear.cpp`).

Everything else is torch's: float32 has good kernels there.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.native import empty_on_huge_pages

PANEL_ROWS = 32  # rows of the weight in one panel, as in native/linear.cpp


def pack(weight: Tensor) -> Tensor | None:
    """Return the panels of `weight` [N, K], N filled up to whole panels; None where torch serves this weight better."""
    num_rows, depth = weight.shape
    packer = _packer()
    if packer is None or weight.dtype != torch.bfloat16 or depth % 2 or weight.numel() == 0:
        return None
    weight = weight.detach().contiguous()
    panels = empty_on_huge_pages((-(-num_rows // PANEL_ROWS), depth // 2, PANEL_ROWS, 2), weight.dtype)
    packer(weight.data_ptr(), panels.data_ptr(), num_rows, depth, torch.get_num_threads())
    return panels


def linear(x: Tensor, panels: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
    """x [T, K] times panels of a weight of `shape` [N, K]. Raises `ValueError` for an `x` or bias that does not fit."""
    num_columns, depth = shape
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != depth:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}: give torch.bfloat16 [tokens, {depth}]")
    if bias is not None and (bias.dtype != torch.bfloat16 or bias.shape != (num_columns,)):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}: give torch.bfloat16 [{num_columns}]")
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()  # held by name: a temporary would be freed before the kernel reads it
    out = torch.empty((x.shape[0], num_columns), dtype=x.dtype)
    kernel = _kernel()
    assert kernel is not None, "panels exist only where the kernel does"
    kernel(
        x.data_ptr(),
        x.stride(0),
        panels.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        num_columns,
        depth,
        torch.get_num_threads(),
    )
    return out


@functools.cache
def _packer() -> native.NativeFunction | None:
    supported = native.function("baton_has_linear", returns=native.INT)
    if supported is None or not supported():
        return None
    return native.function("baton_pack_linear", native.POINTER, native.POINTER, native.I64, native.I64, native.INT)


@functools.cache
def _kernel() -> native.NativeFunction | None:
    pointer, i64 = native.POINTER, native.I64
    return native.function("baton_linear", pointer, i64, pointer, pointer, pointer, native.ROWS, i64, i64, native.INT)

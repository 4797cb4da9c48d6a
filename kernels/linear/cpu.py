"""Linear layers on a CPU, in bfloat16 and float32, in C++ (`native/linear.cpp`). Torch computes float16."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.native import empty_on_huge_pages

PANEL_ROWS = 32  # rows of the weight in one panel, as in native/linear.cpp


def pack(weight: Tensor) -> Tensor | None:
    """Return the panels of `weight` [N, K], with N padded to whole panels; None if torch suits this weight better."""
    num_rows, depth = weight.shape
    dtype = native.DTYPE_NUMBER.get(weight.dtype)
    supported = native.function("baton_has_linear", native.INT, native.I64, returns=native.INT)
    if supported is None or dtype is None or not supported(dtype, depth) or num_rows == 0:
        return None
    pointer, i64, int_ = native.POINTER, native.I64, native.INT
    packer = native.function("baton_pack_linear", int_, pointer, pointer, i64, i64, int_)
    assert packer is not None, "the library was there a moment ago"
    weight = weight.detach().contiguous()
    panels = empty_on_huge_pages((-(-num_rows // PANEL_ROWS), depth * PANEL_ROWS), weight.dtype)
    packer(dtype, weight.data_ptr(), panels.data_ptr(), num_rows, depth, torch.get_num_threads())
    return panels


def linear(x: Tensor, panels: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
    """Multiply x [T, K] by panels of a weight of `shape` [N, K]. Raises `ValueError` if x or bias does not match."""
    num_columns, depth = shape
    dtype = panels.dtype
    if x.dtype != dtype or x.dim() != 2 or x.shape[1] != depth:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}: give {dtype} [tokens, {depth}]")
    if bias is not None and (bias.dtype != dtype or bias.shape != (num_columns,)):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}: give {dtype} [{num_columns}]")
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()  # kept in a variable: a temporary would be freed before the kernel reads it
    out = torch.empty((x.shape[0], num_columns), dtype=dtype)
    kernel = _kernel()
    assert kernel is not None, "panels exist only where the kernel does"
    kernel(
        native.DTYPE_NUMBER[dtype],
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
def _kernel() -> native.NativeFunction | None:
    pointer, i64, int_ = native.POINTER, native.I64, native.INT
    return native.function("baton_linear", int_, pointer, i64, pointer, pointer, pointer, native.ROWS, i64, i64, int_)

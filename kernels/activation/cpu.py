"""Gated activations and the soft cap in C++ (`native/activation.cpp`); plain activations in torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from baton.kernels import native

from . import reference
from .reference import Activation, Pointwise

_NUMBER = {Activation.SILU: 0, Activation.GELU_TANH: 1}  # as native/activation.cpp numbers them


def activation_and_mul(gate_up: Tensor, activation: Activation, out: Tensor | None) -> Tensor:
    kernel = _product()
    number = native.DTYPE_NUMBER.get(gate_up.dtype)
    if kernel is None or number is None:
        return reference.activation_and_mul(gate_up, activation, out)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up is {list(gate_up.shape)}: give [tokens, 2 * width]")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    if out is None:
        out = torch.empty((rows, width), dtype=gate_up.dtype)
    elif out.shape != (rows, width) or out.dtype != gate_up.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {list(out.shape)}: give contiguous {gate_up.dtype} [{rows}, {width}]")
    kernel(
        number,
        _NUMBER[activation],
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        rows,
        width,
        torch.get_num_threads(),
    )
    return out


def activate_each(x: Tensor, activation: Pointwise) -> Tensor:
    match activation:
        case Pointwise.RELU2:
            return x.relu_().square_()  # rounded once: ReLU is exact


def soft_cap(x: Tensor, cap: float) -> Tensor:
    kernel = _cap()
    number = native.DTYPE_NUMBER.get(x.dtype)
    if kernel is None or number is None:
        return reference.soft_cap(x, cap)
    kernel(number, x.data_ptr(), x.stride(0), *x.shape, cap, torch.get_num_threads())
    return x


@functools.cache
def _product() -> native.NativeFunction | None:
    pointer, i64, integer = native.POINTER, native.I64, native.INT
    return native.function(
        "baton_activation_and_mul", integer, integer, pointer, i64, pointer, native.ROWS, i64, integer
    )


@functools.cache
def _cap() -> native.NativeFunction | None:
    pointer, i64, integer = native.POINTER, native.I64, native.INT
    return native.function("baton_soft_cap", integer, pointer, i64, native.ROWS, i64, native.F32, integer)

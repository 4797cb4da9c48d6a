"""Activations (gated and plain), gates of heads, and the soft cap in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl

from .reference import Activation, Pointwise

FEW_VALUES = 1 << 20  # up to this many, programs are small, so that they fill the device


def activation_and_mul(gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
    """See `baton.kernels.activation.activation_and_mul`. Raises `ValueError` for shapes that do not fit."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up is {list(gate_up.shape)}: give [tokens, 2 * width]")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    if out is None:
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    elif out.shape != (rows, width) or out.dtype != gate_up.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {list(out.shape)}: give contiguous {gate_up.dtype} [{rows}, {width}]")
    if out.numel():
        columns, num_warps = _shape(out.numel())
        activation_and_mul_kernel[(rows * triton.cdiv(width, columns),)](
            gate_up,
            out,
            gate_up.stride(0),
            WIDTH=width,
            COLUMNS=columns,
            ACTIVATION=activation.value,
            num_warps=num_warps,
            **pdl.launch_options(),
        )
    return out


def activate_each(x: Tensor, activation: Pointwise) -> Tensor:
    """See `baton.kernels.activation.activate_each`."""
    rows, width = x.shape
    if x.numel():
        columns, num_warps = _shape(x.numel())
        activate_each_kernel[(rows * triton.cdiv(width, columns),)](
            x,
            x.stride(0),
            WIDTH=width,
            COLUMNS=columns,
            ACTIVATION=activation.value,
            num_warps=num_warps,
            **pdl.launch_options(),
        )
    return x


def gate_heads(x: Tensor, gate: Tensor, add_to: Tensor | None = None) -> Tensor:
    """See `baton.kernels.activation.gate_heads`."""
    num_tokens, heads, dim = x.shape
    out = x if add_to is None else add_to
    if x.numel():
        columns, num_warps = _shape(x.numel())
        gate_heads_kernel[(num_tokens * triton.cdiv(heads * dim, columns),)](
            x,
            gate,
            out,
            *(x.stride(0), x.stride(1), gate.stride(0), gate.stride(1)),
            *((x.stride(0), x.stride(1)) if add_to is None else (heads * dim, dim)),
            HEADS=heads,
            DIM=dim,
            EACH=gate.shape[2] > 1,
            ADD=add_to is not None,
            COLUMNS=columns,
            num_warps=num_warps,
            **pdl.launch_options(),
        )
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """See `baton.kernels.activation.soft_cap`."""
    rows, width = x.shape
    if x.numel():
        columns, num_warps = _shape(x.numel())
        soft_cap_kernel[(rows * triton.cdiv(width, columns),)](
            x, x.stride(0), cap, WIDTH=width, COLUMNS=columns, num_warps=num_warps, **pdl.launch_options()
        )
    return x


def _shape(num_values: int) -> tuple[int, int]:
    """Return (columns of a program, its warps)."""
    return (512, 2) if num_values <= FEW_VALUES else (2048, 4)


@triton.jit
def activated(values, ACTIVATION: tl.constexpr):
    """Apply the activation of this name to float32 values.

    SiLU is x * sigmoid(x); GELU (tanh) is x * sigmoid(2 u), because 1 + tanh(u) = 2 * sigmoid(2 u).
    """
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_tanh" or ACTIVATION == "relu2")
    if ACTIVATION == "relu2":
        result = tl.where(values < 0.0, 0.0, values)  # keeps NaN
        result *= result
    else:
        exponent = values
        if ACTIVATION == "gelu_tanh":
            exponent = 1.5957691216057308 * (values + 0.044715 * values * values * values)  # 2 * sqrt(2 / pi)
        result = values / (1.0 + tl.exp(-exponent))
    return result


@triton.jit
def activation_and_mul_kernel(
    gate_up, out, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr
):
    """Compute COLUMNS columns of one row; gate_up rows are `stride` apart, out [rows, WIDTH]."""
    pdl.let_next_start()
    programs_per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    columns = tl.program_id(0) % programs_per_row * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    pdl.wait_for_previous()
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    result = activated(gate, ACTIVATION) * up
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def activate_each_kernel(x, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Activate COLUMNS columns of one row in place."""
    pdl.let_next_start()
    programs_per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    columns = tl.program_id(0) % programs_per_row * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    pdl.wait_for_previous()
    values = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + row * stride + columns, activated(values, ACTIVATION).to(x.dtype.element_ty), mask=mask)


@triton.jit
def gate_heads_kernel(
    x,
    gate,
    out,
    x_stride,
    x_head_stride,
    gate_stride,
    gate_head_stride,
    out_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    EACH: tl.constexpr,  # a gate for every value
    ADD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute COLUMNS values of one token. Values of a head are contiguous; heads and tokens have any stride."""
    pdl.let_next_start()
    programs_per_row: tl.constexpr = (HEADS * DIM + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    column = tl.program_id(0) % programs_per_row * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < HEADS * DIM
    head, place = column // DIM, column % DIM
    gates = gate + row * gate_stride + head * gate_head_stride
    if EACH:
        gates += place
    cells = out + row * out_stride + head * out_head_stride + place
    pdl.wait_for_previous()
    factor = 1.0 / (1.0 + tl.exp(-tl.load(gates, mask=mask, other=0.0).to(tl.float32)))
    values = tl.load(x + row * x_stride + head * x_head_stride + place, mask=mask, other=0.0).to(tl.float32)
    result = values * factor
    if ADD:
        result += tl.load(cells, mask=mask, other=0.0).to(tl.float32)
    tl.store(cells, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def soft_cap_kernel(x, stride, cap, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Cap COLUMNS columns of one row in place: tanh(y) = 1 - 2 / (e^2y + 1)."""
    pdl.let_next_start()
    programs_per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    columns = tl.program_id(0) % programs_per_row * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    pdl.wait_for_previous()
    values = tl.load(x + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    values = cap * (1.0 - 2.0 / (tl.exp(values * (2.0 / cap)) + 1.0))
    tl.store(x + row * stride + columns, values.to(x.dtype.element_ty), mask=mask)

"""RMSNorm in Triton: one program has a whole row in its registers, so that the row is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl

from .reference import Gating

ELEMENTS_PER_THREAD = 8  # one load of 16 bytes
GATED_ELEMENTS = 4096  # elements of a program, 32 per thread
MANY_ROWS = 1024  # from here on, the device is full, and programs take more rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """See `baton.kernels.rms_norm.rms_norm`. Raises `ValueError` for shapes that do not fit."""
    width = x.shape[-1]
    if weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
        given = "" if residual is None else f" and residual {list(residual.shape)}"
        raise ValueError(
            f"x {list(x.shape)} with weight {list(weight.shape)}{given}: give weight [{width}], residual as x"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    rows = _rows(x)
    residual_rows = None if residual is None else _rows(residual)
    num_rows = rows.shape[0]
    if num_rows and width:
        columns = triton.next_power_of_2(width)
        rows_per_program, num_warps = launch_shape(num_rows, columns)
        rms_norm_kernel[(triton.cdiv(num_rows, rows_per_program),)](
            rows,
            residual_rows,
            weight,
            out,
            total,
            num_rows,
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            eps,
            WIDTH=width,
            COLUMNS=columns,
            ROWS=rows_per_program,
            num_warps=num_warps,
            **pdl.launch_options(),
        )
    return out if total is None else (out, total)


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    eps: float,
    *,
    gating: Gating = Gating.SILU,
    gate_first: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.rms_norm.gated_rms_norm`."""
    num_tokens, num_heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    columns = triton.next_power_of_2(width)
    num_rows, rows_per_program = num_tokens * num_heads, max(1, GATED_ELEMENTS // columns)
    if num_rows and width:
        gated_rms_norm_kernel[(triton.cdiv(num_rows, rows_per_program),)](
            x,
            gate,
            weight,
            out,
            num_rows,
            x.stride(0),
            gate.stride(0),
            out.stride(0),
            eps,
            HEADS=num_heads,
            WIDTH=width,
            COLUMNS=columns,
            ROWS=rows_per_program,
            SIGMOID=gating is Gating.SIGMOID,
            GATE_FIRST=gate_first,
            WEIGHT_OF_HEADS=weight.dim() == 2,
            num_warps=4 if columns <= GATED_ELEMENTS else 8,
            **pdl.launch_options(),
        )
    return out


def launch_shape(num_rows: int, columns: int) -> tuple[int, int]:
    """Return (rows of a program, its warps). With few rows, a row has as many threads as have values to load."""
    loads_per_row = max(1, columns // ELEMENTS_PER_THREAD)
    if num_rows < MANY_ROWS:
        return 1, min(16, max(1, loads_per_row // 32))
    rows = max(1, 4096 // columns)
    return rows, min(16, max(1, rows * loads_per_row // 64))


def _rows(x: Tensor) -> Tensor:
    """View x as [rows, N] with contiguous rows; copy only where it must."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,  # [num_rows, WIDTH], rows x_stride apart
    residual,  # [num_rows, WIDTH], rows residual_stride apart, or None
    weight,  # [WIDTH]
    out,  # [num_rows, WIDTH]
    total,  # [num_rows, WIDTH], or None
    num_rows,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH, up to a power of two
    ROWS: tl.constexpr,
):
    pdl.let_next_start()
    columns = tl.arange(0, COLUMNS)[None, :]
    gain = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    mask = columns < WIDTH
    if ROWS > 1:
        mask = mask & (rows < num_rows)
    pdl.wait_for_previous()
    values = tl.load(x + rows * x_stride + columns, mask=mask, other=0.0)
    if residual is not None:
        before = tl.load(residual + rows * residual_stride + columns, mask=mask, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(total + rows * WIDTH + columns, values, mask=mask)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / WIDTH + eps)
    tl.store(out + rows * WIDTH + columns, (values * scale * gain).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def gated_rms_norm_kernel(
    x,  # [tokens, HEADS, WIDTH], tokens x_stride apart
    gate,
    weight,  # [WIDTH] or, WEIGHT_OF_HEADS, [HEADS, WIDTH]
    out,
    num_rows,
    x_stride,
    gate_stride,
    out_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,  # WIDTH, up to a power of two
    ROWS: tl.constexpr,  # heads of a program
    SIGMOID: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WEIGHT_OF_HEADS: tl.constexpr,
):
    pdl.let_next_start()
    column = tl.arange(0, COLUMNS)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (row < num_rows) & (column < WIDTH)
    token = (row // HEADS).to(tl.int64)
    inner = row % HEADS * WIDTH + column
    if WEIGHT_OF_HEADS:
        gain = tl.load(weight + inner, mask=mask, other=0.0).to(tl.float32)
    else:
        gain = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    pdl.wait_for_previous()
    values = tl.load(x + token * x_stride + inner, mask=mask, other=0.0).to(tl.float32)
    logits = tl.load(gate + token * gate_stride + inner, mask=mask, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-logits))
    if not SIGMOID:
        factor *= logits
    if GATE_FIRST:
        values *= factor
        factor = tl.full(factor.shape, 1.0, tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / WIDTH + eps)
    tl.store(out + token * out_stride + inner, (values * scale * gain * factor).to(out.dtype.element_ty), mask=mask)

"""The gated activation in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl

FEW_VALUES = 1 << 20  # so many and less: small programs, to have all of the device at work


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """See `baton.kernels.silu_and_mul.silu_and_mul`. Raises `ValueError` for shapes that do not fit."""
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
        columns, num_warps = (512, 2) if out.numel() <= FEW_VALUES else (2048, 4)
        _silu_and_mul_kernel[(rows * triton.cdiv(width, columns),)](
            gate_up,
            out,
            gate_up.stride(0),
            WIDTH=width,
            COLUMNS=columns,
            num_warps=num_warps,
            **pdl.launch_options(),
        )
    return out


@triton.jit
def _silu_and_mul_kernel(gate_up, out, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute COLUMNS columns of one row; gate_up rows are `stride` apart, out [rows, WIDTH]."""
    pdl.let_next_start()
    programs_per_row: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // programs_per_row).to(tl.int64)
    columns = tl.program_id(0) % programs_per_row * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    pdl.wait_for_previous()
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=mask)

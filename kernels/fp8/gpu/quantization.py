"""FP8 quantization of inputs (E4M3), per token or per group of 128 values, with an optional RMSNorm before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl
from baton.kernels.linear import RowNorm

from ..weight import BLOCK, LARGEST


def quantize(x: Tensor, group: int, norm: RowNorm | None = None, *, multiple_of: int = 1) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K], or its norm, to E4M3, with a scale for each `group` of values (128 or K).

    See `reference.quantize`. The results have `multiple_of` rows or a multiple of that, the last ones undefined.
    """
    num_tokens, depth = x.shape
    num_rows = triton.cdiv(num_tokens, multiple_of) * multiple_of
    x = x if x.stride(1) == 1 else x.contiguous()
    quantized = torch.empty((num_rows, depth), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((depth // group, num_rows), dtype=torch.float32, device=x.device)
    shape = num_rows, depth, x.stride(0)
    if norm is not None:
        columns = triton.next_power_of_2(depth)
        _quantize_normed_kernel[(num_tokens,)](
            x,
            norm.weight,
            quantized,
            scale,
            *shape,
            norm.eps,
            columns,
            BLOCK if group == BLOCK else columns,
            LARGEST,
            num_warps=min(16, max(1, columns // 512)),
            **pdl.launch_options(),
        )
    elif group == BLOCK:
        groups = min(16, triton.next_power_of_2(depth // BLOCK))
        grid = (num_tokens, triton.cdiv(depth // BLOCK, groups))
        _quantize_groups_kernel[grid](
            x, quantized, scale, *shape, BLOCK, groups, LARGEST, num_warps=4, **pdl.launch_options()
        )
    else:
        chunk = min(4096, triton.next_power_of_2(depth))
        _quantize_tokens_kernel[(num_tokens,)](
            x, quantized, scale, *shape, chunk, LARGEST, num_warps=max(1, chunk // 512), **pdl.launch_options()
        )
    return quantized, scale


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_groups_kernel(
    x, quantized, scale, num_rows, depth, stride, BLOCK: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr
):
    """Quantize some groups of one token."""
    pdl.wait_for_previous()
    pdl.let_next_start()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    exists = group < depth // BLOCK
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + token * stride + column, mask=exists[:, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1)
    factor = tl.where(largest > 0, largest / LARGEST, 1.0)
    narrow = (values / factor[:, None]).to(quantized.dtype.element_ty)
    tl.store(quantized + token * depth + column, narrow, mask=exists[:, None])
    tl.store(scale + group.to(tl.int64) * num_rows + token, factor, mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_tokens_kernel(x, quantized, scale, num_rows, depth, stride, CHUNK: tl.constexpr, LARGEST: tl.constexpr):
    """Quantize one token: it is read for its largest value, and again, from the hardware cache, to be converted."""
    pdl.wait_for_previous()
    pdl.let_next_start()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK)
    x += token * stride
    quantized += token * depth
    largest = tl.zeros([CHUNK], tl.float32)
    for start in range(0, depth, CHUNK):
        values = tl.load(x + start + column, mask=start + column < depth, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    most = tl.max(largest, 0)
    factor = tl.where(most > 0, most / LARGEST, 1.0)
    for start in range(0, depth, CHUNK):
        exists = start + column < depth
        values = tl.load(x + start + column, mask=exists, other=0.0).to(tl.float32)
        tl.store(quantized + start + column, (values / factor).to(quantized.dtype.element_ty), mask=exists)
    tl.store(scale + token, factor)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_normed_kernel(
    x,
    norm_weight,
    quantized,
    scale,
    num_rows,
    depth,
    stride,
    eps,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Quantize the RMSNorm of one token, without rounding it in between."""
    GROUPS: tl.constexpr = COLUMNS // GROUP
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = column < depth
    norm = tl.load(norm_weight + column, mask=exists, other=0.0).to(tl.float32)
    pdl.wait_for_previous()
    pdl.let_next_start()
    token = tl.program_id(0).to(tl.int64)
    values = tl.load(x + token * stride + column, mask=exists, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(values * values, 1), 0) / depth
    values *= tl.rsqrt(mean + eps) * norm
    largest = tl.max(tl.abs(values), 1)
    factor = tl.where(largest > 0, largest / LARGEST, 1.0)
    narrow = (values / factor[:, None]).to(quantized.dtype.element_ty)
    tl.store(quantized + token * depth + column, narrow, mask=exists)
    group = tl.arange(0, GROUPS)
    tl.store(scale + group.to(tl.int64) * num_rows + token, factor, mask=group * GROUP < depth)

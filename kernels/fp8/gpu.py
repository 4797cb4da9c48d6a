"""Linear layers over weights in 8 bits on Hopper and later.

    x ──quantize──> E4M3 and scales ──product──> out

The product runs on the tensor cores' own 8-bit instructions. These add up in some 14 bits, in which a sum of thousands
of like values would lose a fifth, so what they made of each 128 values is added up in float32.

Few tokens: small tiles, and several programs for one tile where there would be fewer tiles than multiprocessors, so
that each of these reads its share of the weight. Many tokens: torch's product, where it takes the shape.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl, tuned
from baton.kernels.linear import RowNorm

from .weight import BLOCK, LARGEST, Fp8Weight

MANY_TOKENS = {"rows": 256, "blocks": 128}  # above: torch's product, by what the weight has a scale a
BAND = 8  # tiles of tokens that are multiplied with the same stretch of the weight while that is in the cache

MOST_SPLIT_TILES = 4096

# TOKENS x COLUMNS is the tile of one program; GROUPS of 128 values of the depth are one step of its loop; TURNED makes
# the weight the left operand, whose tile must be 64 high, so that the tile of tokens may be narrower; SPLIT programs
# share the depth of a tile.
OPTIONS: dict[int, tuned.Options] = {
    16: {"TOKENS": 16, "COLUMNS": 64, "GROUPS": 2, "TURNED": 1, "SPLIT": 1, "STAGES": 6, "num_warps": 4},
    32: {"TOKENS": 32, "COLUMNS": 64, "GROUPS": 2, "TURNED": 1, "SPLIT": 1, "STAGES": 4, "num_warps": 4},
    128: {"TOKENS": 64, "COLUMNS": 64, "GROUPS": 1, "TURNED": 0, "SPLIT": 1, "STAGES": 5, "num_warps": 4},
    1 << 31: {"TOKENS": 64, "COLUMNS": 128, "GROUPS": 1, "TURNED": 0, "SPLIT": 1, "STAGES": 4, "num_warps": 4},
}


def linear(
    x: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.fp8.linear`."""
    target = out if add_to is None else add_to
    if target is None:
        target = x.new_empty(x.shape[0], weight.shape[0])
    if x.shape[0] == 0:
        return target
    quantized, scale = quantize(x, BLOCK if weight.in_blocks else x.shape[1], norm)
    if x.shape[0] > MANY_TOKENS[weight.scaled_by] and _torch_takes(weight, target):
        if add_to is None:
            return _product_of_torch(quantized, scale, weight, bias, target)
        return add_to.add_(_product_of_torch(quantized, scale, weight, bias, torch.empty_like(target)))
    return product(quantized, scale, weight, bias, target, add=add_to is not None)


def quantize(x: Tensor, group: int, norm: RowNorm | None = None) -> tuple[Tensor, Tensor]:
    """x [T, K], or its norm, in E4M3, and a scale for each `group` of values: 128, or K. See `reference.quantize`."""
    num_tokens, depth = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    quantized = torch.empty((num_tokens, depth), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((depth // group, num_tokens), dtype=torch.float32, device=x.device)
    shape = num_tokens, depth, x.stride(0)
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


def product(
    quantized: Tensor,
    scale: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    out: Tensor,
    options: tuned.Options | None = None,
    *,
    add: bool = False,
) -> Tensor:
    """`quantized` [T, K] with its scales, times the weight, into `out` [T, N], or added to what that holds.

    `options` serve instead of the tuned ones.
    """
    num_tokens, depth = quantized.shape
    num_columns = weight.shape[0]
    if options is None:
        default = next(options for most, options in OPTIONS.items() if num_tokens <= most)
        options = tuned.config("fp8", quantized.device, tuning_key(quantized, weight), default)
    if weight.in_blocks and depth // BLOCK % options["GROUPS"]:
        options = {**options, "GROUPS": 1}
    tiles = triton.cdiv(num_tokens, options["TOKENS"]) * triton.cdiv(num_columns, options["COLUMNS"])
    split = options["SPLIT"] if tiles <= MOST_SPLIT_TILES else 1
    options = {**options, "SPLIT": split}
    partial, arrived = None, None
    if split > 1:
        partial = out.new_empty(tiles * split * options["TOKENS"] * options["COLUMNS"], dtype=torch.float32)
        arrived = _arrivals(out.device)
    _product_kernel[(tiles, split)](
        quantized,
        scale,
        weight.data,
        weight.scale,
        bias,
        out,
        partial,
        arrived,
        num_tokens,
        num_columns,
        depth,
        out.stride(0),
        ADD=add,
        IN_BLOCKS=weight.in_blocks,
        WHOLE_STEPS=depth % (BLOCK * options["GROUPS"]) == 0,
        BLOCK=BLOCK,
        BAND=BAND,
        **options,
        **pdl.launch_options(),
    )
    return out


@functools.cache
def _arrivals(device: torch.device) -> Tensor:
    """How many programs are done with their share of each tile: zero before and after every product.

    One for all products of a device: they run one after another, in one stream and in graphs of it.
    """
    return torch.zeros(MOST_SPLIT_TILES, dtype=torch.int32, device=device)


def tuning_key(quantized: Tensor, weight: Fp8Weight) -> tuned.Key:
    """What the best options of a product depend on."""
    columns, depth = weight.shape
    return {"scales": weight.scaled_by, "tokens": quantized.shape[0], "columns": columns, "depth": depth}


def _torch_takes(weight: Fp8Weight, out: Tensor) -> bool:
    """torch writes bfloat16 only, and reads the scales of blocks in rows of whole 16 bytes."""
    columns, depth = weight.shape
    fits = columns % 16 == 0 and depth % (4 * BLOCK if weight.in_blocks else 16) == 0
    return fits and out.dtype == torch.bfloat16 and out.is_contiguous()


def _product_of_torch(quantized: Tensor, scale: Tensor, weight: Fp8Weight, bias: Tensor | None, out: Tensor) -> Tensor:
    columns = weight.scale.T if weight.in_blocks else weight.scale[None, :]
    torch._scaled_mm(quantized, weight.data.T, scale.T, columns, out_dtype=out.dtype, use_fast_accum=False, out=out)
    return out if bias is None else out.add_(bias)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_groups_kernel(
    x, quantized, scale, num_tokens, depth, stride, BLOCK: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr
):
    """One program: some groups of one token."""
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
    tl.store(scale + group.to(tl.int64) * num_tokens + token, factor, mask=exists)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_tokens_kernel(x, quantized, scale, num_tokens, depth, stride, CHUNK: tl.constexpr, LARGEST: tl.constexpr):
    """One program: one token, read once for its largest value and again, from the cache, to be written."""
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


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_normed_kernel(
    x,
    norm_weight,
    quantized,
    scale,
    num_tokens,
    depth,
    stride,
    eps,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One program: one token, whose RMSNorm goes to 8 bits without being rounded in between."""
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
    tl.store(scale + group.to(tl.int64) * num_tokens + token, factor, mask=group * GROUP < depth)


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    partial,
    arrived,
    num_tokens,
    num_columns,
    depth,
    out_stride,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    TURNED: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BAND: tl.constexpr,
):
    """One program: a tile TOKENS x COLUMNS of the result, or of SPLIT shares of its depth one.

    Who is last with a tile adds the shares in their order, so that the sum does not depend on who that is.
    """
    token_tile, column_tile = _tile(num_tokens, num_columns, TOKENS, COLUMNS, BAND)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_token = token < num_tokens
    is_column = column < num_columns
    inner = tl.arange(0, BLOCK)
    x += token[:, None].to(tl.int64) * depth + inner[None, :]
    weight += tl.where(is_column, column, 0)[:, None].to(tl.int64) * depth + inner[None, :]
    num_groups = tl.cdiv(depth, BLOCK)
    if IN_BLOCKS:
        tl.static_assert(BLOCK % COLUMNS == 0, "a tile must lie in one row of the weight's blocks")
        # A tensor of one rather than a scalar, which would not be loaded ahead with the others.
        weight_scale += tl.zeros([1], tl.int32) + column_tile * COLUMNS // BLOCK * num_groups
        x_scale += token
    share = tl.cdiv(tl.cdiv(num_groups, GROUPS), SPLIT) * GROUPS
    begin = tl.program_id(1) * share
    pdl.wait_for_previous()
    total = tl.zeros([COLUMNS, TOKENS] if TURNED else [TOKENS, COLUMNS], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + share, num_groups), GROUPS, num_stages=STAGES):
        for offset in tl.static_range(GROUPS):
            group = first + offset
            if WHOLE_STEPS:
                rows = tl.load(x + group * BLOCK, mask=is_token[:, None], other=0.0)
                columns = tl.load(weight + group * BLOCK)
            else:
                exists = group * BLOCK + inner < depth
                rows = tl.load(x + group * BLOCK, mask=is_token[:, None] & exists[None, :], other=0.0)
                columns = tl.load(weight + group * BLOCK, mask=exists[None, :], other=0.0)
            if IN_BLOCKS:
                factor = tl.load(x_scale + group * num_tokens, mask=is_token, other=0.0) * tl.load(weight_scale + group)
                if TURNED:
                    total += tl.dot(columns, tl.trans(rows)) * factor[None, :]
                else:
                    total += tl.dot(rows, tl.trans(columns)) * factor[:, None]
            elif TURNED:
                total = tl.dot(columns, tl.trans(rows), total, max_num_imprecise_acc=BLOCK)
            else:
                total = tl.dot(rows, tl.trans(columns), total, max_num_imprecise_acc=BLOCK)
    pdl.let_next_start()
    is_last = True
    if SPLIT > 1:
        tile = tl.program_id(0)
        cell = tl.arange(0, total.shape[0])[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]
        partial += tile * (SPLIT * TOKENS * COLUMNS)
        tl.store(partial + tl.program_id(1) * (TOKENS * COLUMNS) + cell, total)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            total = tl.zeros_like(total)
            for part in tl.static_range(SPLIT):
                total += tl.load(partial + part * (TOKENS * COLUMNS) + cell, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if is_last:
        result = tl.trans(total) if TURNED else total
        if not IN_BLOCKS:
            row_scale = tl.load(x_scale + token, mask=is_token, other=0.0)
            column_scale = tl.load(weight_scale + column, mask=is_column, other=0.0)
            result *= row_scale[:, None] * column_scale[None, :]
        if bias is not None:
            result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        place = token[:, None].to(tl.int64) * out_stride + column[None, :]
        inside = is_token[:, None] & is_column[None, :]
        if ADD:
            result += tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile(num_tokens, num_columns, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """(tile of tokens, tile of columns) of this program: bands of BAND tiles of tokens, column by column."""
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    index = tl.program_id(0)
    band = index // (BAND * column_tiles)
    height = tl.minimum(token_tiles - band * BAND, BAND)
    inside = index % (BAND * column_tiles)
    return band * BAND + inside % height, inside // height

"""FP8 matrix products, with split-K for few tokens.

They use the tensor cores' 8-bit instructions. These accumulate only about 14 bits: a sum of thousands of similar values
would lose a fifth. So the partial sums of each 128 values are added in float32.

Tiles are small for few tokens, and several programs share a tile if there would be fewer tiles than multiprocessors.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl, tuned
from baton.kernels.arrivals import is_last_to_arrive

from ..weight import BLOCK, Fp8Weight

BAND = 8  # tiles of tokens that are multiplied by the same part of the weight while it is in L2
MOST_SPLIT_TILES = 4096

# TOKENS x COLUMNS is the tile of a program. A loop iteration takes GROUPS groups of 128 values of the depth. TURNED
# makes the weight the left operand: the left operand's tile must be 64 high, and so the tile of tokens may be narrower.
# SPLIT programs share the depth of a tile.
OPTIONS: dict[int, tuned.Options] = {
    16: {"TOKENS": 16, "COLUMNS": 64, "GROUPS": 2, "TURNED": 1, "SPLIT": 1, "STAGES": 6, "num_warps": 4},
    32: {"TOKENS": 32, "COLUMNS": 64, "GROUPS": 2, "TURNED": 1, "SPLIT": 1, "STAGES": 4, "num_warps": 4},
    128: {"TOKENS": 64, "COLUMNS": 64, "GROUPS": 1, "TURNED": 0, "SPLIT": 1, "STAGES": 5, "num_warps": 4},
    1 << 31: {"TOKENS": 64, "COLUMNS": 128, "GROUPS": 1, "TURNED": 0, "SPLIT": 1, "STAGES": 4, "num_warps": 4},
}


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
    """Multiply `quantized` [T, K] with its scales by the weight, into `out` [T, N], or add the product to `out`.

    `options` replace the tuned ones.
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
    gemm_kernel[(tiles, split)](
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
    """Return the arrival counters of split tiles: zero before and after every product.

    All products of a device share them, since they run one after another, in one stream and its graphs.
    """
    return torch.zeros(MOST_SPLIT_TILES, dtype=torch.int32, device=device)


def tuning_key(quantized: Tensor, weight: Fp8Weight) -> tuned.Key:
    """Return the key for the tuned options of a product."""
    columns, depth = weight.shape
    return {"scales": weight.scaled_by, "tokens": quantized.shape[0], "columns": columns, "depth": depth}


@triton.jit(do_not_specialize=["num_tokens"])
def gemm_kernel(
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
    """Compute a tile TOKENS x COLUMNS of the result, or the part of it from one of SPLIT shares of the depth.

    The last program of a tile adds the parts in their order, so that the sum does not depend on which one is last.
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
        # A tensor of one element: a scalar would not be prefetched by the loop's pipeline.
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
        is_last = is_last_to_arrive(arrived + tile, SPLIT - 1)
        if is_last:
            total = tl.zeros_like(total)
            for part in tl.static_range(SPLIT):
                total += tl.load(partial + part * (TOKENS * COLUMNS) + cell, cache_modifier=".cg")
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
    """Return this program's (tile of tokens, tile of columns): bands of BAND tiles of tokens, column by column."""
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    index = tl.program_id(0)
    band = index // (BAND * column_tiles)
    height = tl.minimum(token_tiles - band * BAND, BAND)
    inside = index % (BAND * column_tiles)
    return band * BAND + inside % height, inside // height

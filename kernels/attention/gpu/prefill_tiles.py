"""Prefill attention for any GPU, head size and cache type: one program per tile of queries, with gathered loads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.kv_rows import kv_rows
from baton.kernels.query_tiles import (
    FIRST_POSITION,
    FIRST_TOKEN,
    ITEM_WORDS,
    NUM_TOKENS,
    TABLE_ROW,
    PrefillPlan,
)
from baton.kernels.split_kv import LOG2_E

from ..rule import AttentionRule

FLOAT32 = tl.constexpr("tf32x3")  # three products on the tensor cores, about as accurate as one in float32


def prefill_tiles(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: PrefillPlan,
    rule: AttentionRule,
    *,
    out: Tensor,
) -> None:
    """See `gpu.paged_prefill`."""
    num_heads = q.shape[1]
    attend_tile[(plan.num_items * (num_heads // plan.pack),)](
        q,
        kv,
        out,
        *(rule.sinks, rule.k_scale, rule.v_scale),
        plan.items,
        plan.num_tiles,
        batch.block_tables,
        layer,
        *(rule.score_unit, rule.cap_scale, rule.limit),
        num_heads,
        *q.stride()[:2],
        *out.stride()[:2],
        *kv.stride()[:3],
        kv_rows(kv, q.shape[2]).to_value,
        batch.block_tables.stride(0),
        **tile_options(q, kv, plan, rule),
    )


def tile_options(q: Tensor, kv: Tensor, plan: PrefillPlan, rule: AttentionRule) -> dict[str, int]:
    """Return the compile-time arguments and launch options of kernels that use `attend_keys`."""
    num_heads, dim = q.shape[1:]
    rows = kv_rows(kv, dim)
    width = max(dim, rows.value_dim)
    small = width * q.dtype.itemsize <= 256  # larger tiles of narrow rows fit in shared memory and registers
    widest = width > 256
    return {
        "GROUP": num_heads // kv.shape[1],
        "PACK": plan.pack,
        "ROWS": plan.rows,
        "KEYS": 64 if small else 16 if widest else 32,
        "DIM": dim,
        "PADDED_DIM": triton.next_power_of_2(dim),
        "VALUE_DIM": rows.value_dim,
        "PADDED_VALUE_DIM": triton.next_power_of_2(rows.value_dim),
        "TOKEN_STRIDE": rows.token_stride,
        "BLOCK_SIZE": kv.shape[4],
        "HAS_WINDOW": rule.has_window,
        "HAS_CAP": rule.has_cap,
        "num_warps": plan.rows // (8 if widest else 16),
        "num_stages": 3 if small else 2,
    }


@triton.jit
def read_item(item, block_tables, table_stride):
    """Return a tile's first token, number of tokens, first position, and a pointer to its sequence's block ids."""
    token = tl.load(item + FIRST_TOKEN).to(tl.int64)
    count = tl.load(item + NUM_TOKENS)
    first_position = tl.load(item + FIRST_POSITION)
    return token, count, first_position, block_tables + tl.load(item + TABLE_ROW).to(tl.int64) * table_stride


@triton.jit
def row_places(base, token, head, token_stride, head_stride, PADDED_DIM: tl.constexpr):
    """Return pointers to the rows of a tile in q or out, given the token and the head of each row."""
    return base + ((token * token_stride + head * head_stride)[:, None] + tl.arange(0, PADDED_DIM)[None, :])


@triton.jit
def units_of_stored(score_unit, cap_scale, k_scale, HAS_CAP: tl.constexpr):
    """Return a rule's `score_unit` and `cap_scale`, multiplied by `k_scale`, for use with keys as they are stored."""
    if k_scale is not None:
        if HAS_CAP:
            cap_scale *= tl.load(k_scale)
        else:
            score_unit *= tl.load(k_scale)
    return score_unit, cap_scale


@triton.jit
def as_operand(stored, dtype: tl.constexpr):
    """Convert stored keys or values to the type of the queries.

    From 8 bits to bfloat16 by way of float32, since the device's direct conversion of float16 to bfloat16 is slower.
    """
    if stored.dtype.primitive_bitwidth == 8 and dtype == tl.bfloat16:
        stored = stored.to(tl.float32)
    return stored.to(dtype)


@triton.jit
def weighted_mean(acc, total, v_scale):
    """Return the result of every row's running softmax; zeros for rows without keys."""
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        result *= tl.load(v_scale)
    return result


@triton.jit
def attend_keys(
    acc,
    total,
    top,
    query,
    position,
    k_base,
    v_base,
    table,
    block_stride,
    first_key,
    last_key,
    num_keys,
    score_unit,
    cap_scale,
    window,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Add keys first_key:last_key to every row's running softmax: sum of values, sum of weights, top score.

    MASKED: some rows may not see some keys, or the last tile extends past the sequence.
    """
    dim = tl.arange(0, PADDED_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    for start in tl.range(first_key, last_key, KEYS):
        key = start + tl.arange(0, KEYS)
        exists = key < num_keys if MASKED else tl.full([KEYS], True, tl.int1)
        if MASKED and HAS_WINDOW:  # blocks behind the window may be other requests' by now, and hold NaN
            exists &= key > tl.min(position, 0) - window
        block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        place = (block * block_stride + key % BLOCK_SIZE * TOKEN_STRIDE)[:, None]
        mask = exists[:, None] & (dim < DIM)[None, :] if DIM != PADDED_DIM else exists[:, None]
        k = tl.load(k_base + (place + dim[None, :]), mask=mask, other=0.0)
        scores = tl.dot(query, as_operand(k, query.dtype).T, input_precision=FLOAT32)
        if HAS_CAP:
            scores = 1 - 2 / (tl.exp2(scores * cap_scale) + 1)
        if MASKED:
            distance = position[:, None] - key[None, :]
            visible = distance >= 0
            if HAS_WINDOW:
                visible &= distance < window
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # for a row that has seen no key yet, -inf - -inf would be NaN
        shift = tl.where(new_top == float("-inf"), 0.0, new_top * score_unit) if MASKED else new_top * score_unit
        weights = tl.exp2(scores * score_unit - shift[:, None])
        shrink = tl.exp2(top * score_unit - shift)
        total = total * shrink + tl.sum(weights, 1)
        value_mask = exists[:, None]
        if VALUE_DIM != PADDED_VALUE_DIM:
            value_mask = value_mask & (value_dim < VALUE_DIM)[None, :]
        v = tl.load(v_base + (place + value_dim[None, :]), mask=value_mask, other=0.0)
        acc = tl.dot(
            weights.to(query.dtype), as_operand(v, query.dtype), acc * shrink[:, None], input_precision=FLOAT32
        )
        top = new_top
    return acc, total, top


@triton.jit(do_not_specialize=["layer", "window"])
def attend_tile(
    q,
    kv,
    out,
    sinks,
    k_scale,
    v_scale,
    items,
    num_tiles,
    block_tables,
    layer,
    score_unit,
    cap_scale,
    window,
    num_heads,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    head_stride,
    layer_stride,
    to_value,
    table_stride,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Compute one tile of queries over all keys that it sees. Programs of one KV head are neighbours, to share L2."""
    num_tiles = tl.load(num_tiles)
    item = items + tl.program_id(0) % num_tiles * ITEM_WORDS
    first_head = tl.program_id(0) // num_tiles * PACK
    if first_head >= num_heads:
        return
    token, count, first_position, table = read_item(item, block_tables, table_stride)
    num_keys = first_position + count

    row = tl.arange(0, ROWS)
    row_token, row_head = row // PACK, first_head + row % PACK
    dim = tl.arange(0, PADDED_DIM)
    mask = (row_token < count)[:, None] & (dim < DIM)[None, :]
    source = row_places(q, token + row_token, row_head, q_token_stride, q_head_stride, PADDED_DIM)
    query = tl.load(source, mask=mask, other=0.0)
    position = first_position + row_token

    score_unit, cap_scale = units_of_stored(score_unit, cap_scale, k_scale, HAS_CAP)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + row_head) * LOG2_E / score_unit
        total += 1.0
    acc = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)

    k_base = kv + layer.to(tl.int64) * layer_stride + first_head // GROUP * head_stride
    v_base = k_base + to_value
    # all rows see all keys of the middle part, so it needs no masks
    middle_end = tl.maximum(first_position + 1, 0) // KEYS * KEYS
    start, middle = 0, 0
    if HAS_WINDOW:
        start = tl.maximum(first_position + 1 - window, 0) // KEYS * KEYS
        middle = tl.minimum(tl.cdiv(tl.maximum(num_keys - window, 0), KEYS), tl.cdiv(num_keys, KEYS)) * KEYS
        middle_end = tl.maximum(middle, middle_end)
    for part in tl.static_range(3):
        if part != 0 or HAS_WINDOW:
            acc, total, top = attend_keys(
                acc,
                total,
                top,
                query,
                position,
                k_base,
                v_base,
                table,
                block_stride,
                start if part == 0 else (middle if part == 1 else middle_end),
                middle if part == 0 else (middle_end if part == 1 else num_keys),
                num_keys,
                score_unit,
                cap_scale,
                window,
                KEYS,
                DIM,
                PADDED_DIM,
                VALUE_DIM,
                PADDED_VALUE_DIM,
                TOKEN_STRIDE,
                BLOCK_SIZE,
                part != 1,
                HAS_WINDOW,
                HAS_CAP,
            )
    result = weighted_mean(acc, total, v_scale)
    target = row_places(out, token + row_token, row_head, out_token_stride, out_head_stride, PADDED_VALUE_DIM)
    mask = (row_token < count)[:, None] & (tl.arange(0, PADDED_VALUE_DIM) < VALUE_DIM)[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)

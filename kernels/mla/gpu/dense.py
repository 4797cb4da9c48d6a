"""Causal attention in Triton over contiguous keys and values of concatenated sequences, as `kv_b_proj` writes them.

    scores [tile of queries, tile of keys] = q_nope k_nope^T + q_rope k_rope^T        one head; all heads share k_rope

Tiles are ordered by head, longest first, so that concurrent programs read the same keys. It serves operands that
`dense_hopper` does not support. The dimensions of nope are a power of two, or the sum of two (192 in GLM-4.7-Flash):
then products are done in two parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.kernels.query_tiles import (
    FIRST_POSITION,
    FIRST_TOKEN,
    ITEM_WORDS,
    NUM_TOKENS,
    TABLE_ROW,
    PrefillPlan,
)
from baton.kernels.split_kv import LOG2_E

KEYS = 64  # of a tile
NUM_WARPS = 8


def num_stages(nope: int, value: int) -> int:
    """Return how many tiles of keys and values are in shared memory, for these dimensions of a head."""
    return 3 if nope + value <= 256 else 2


def parts_of(nope: int) -> tuple[int, int]:
    """Return the two powers of two that add up to `nope`; the second is 0 if it is a power of two itself."""
    first = 1 << (nope.bit_length() - 1)
    return first, nope - first


def dense_prefill(
    q: Tensor,
    keys_values: Tensor,
    k_rope: Tensor,
    key_start: Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """Compute the same as `dense_hopper.dense_prefill`, for any dtype. rope and value must be powers of two."""
    num_heads, value = out.shape[1:]
    rope = k_rope.shape[1]
    nope, rest = parts_of(q.shape[2] - rope)
    rows = keys_values.flatten(1)
    dense_attention_kernel[(plan.num_items, num_heads)](
        _boxes(q.flatten(1), plan.rows, nope),
        _boxes(q.flatten(1), plan.rows, rest or rope),
        _boxes(q.flatten(1), plan.rows, rope),
        _boxes(rows, KEYS, nope),
        _boxes(rows, KEYS, rest or rope),
        _boxes(rows, KEYS, value),
        _boxes(k_rope, KEYS, rope),
        out,
        plan.items,
        key_start,
        scale * LOG2_E.value,
        out.stride(0),
        NOPE=nope,
        REST=rest,
        ROPE=rope,
        VALUE=value,
        QUERIES=plan.rows,
        KEYS=KEYS,
        num_warps=NUM_WARPS,
        num_stages=num_stages(nope + rest, value),
    )


def _boxes(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe `matrix` for TMA, in boxes of rows x columns."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit
def dense_attention_kernel(
    q_nope_boxes,
    q_rest_boxes,
    q_rope_boxes,
    k_nope_boxes,
    k_rest_boxes,
    value_boxes,
    k_rope_boxes,
    out_ptr,
    items_ptr,
    key_start_ptr,
    scale,
    out_stride,
    NOPE: tl.constexpr,
    REST: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    item, head = items_ptr + ITEM_WORDS * tl.program_id(0), tl.program_id(1)
    first_token, num_queries = tl.load(item + FIRST_TOKEN), tl.load(item + NUM_TOKENS)
    if num_queries == 0:
        return
    num_visible = tl.load(item + FIRST_POSITION) + 1  # keys that the first query sees; fewer than one: padding
    first_key = tl.load(key_start_ptr + tl.load(item + TABLE_ROW))
    q_column = head * (NOPE + REST + ROPE)
    q_nope = q_nope_boxes.load([first_token, q_column])
    q_rope = q_rope_boxes.load([first_token, q_column + NOPE + REST])
    if REST > 0:
        q_rest = q_rest_boxes.load([first_token, q_column + NOPE])
    else:
        q_rest = q_rope
    query = tl.arange(0, QUERIES)
    key_in_tile = tl.arange(0, KEYS)
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, VALUE), tl.float32)
    column = head * (NOPE + REST + VALUE)
    num_full = tl.maximum(num_visible, 0) // KEYS * KEYS  # keys in tiles that all queries see completely

    for start in tl.range(0, num_full, KEYS):
        row = first_key + start
        scores = products(q_nope, q_rest, q_rope, k_nope_boxes, k_rest_boxes, k_rope_boxes, row, column, NOPE, REST)
        peak = tl.maximum(highest, tl.max(scores, 1) * scale)
        probs = tl.exp2(scores * scale - peak[:, None])
        decay = tl.exp2(highest - peak)
        weight = weight * decay + tl.sum(probs, 1)
        values = value_boxes.load([row, column + NOPE + REST])
        total = tl.dot(probs.to(values.dtype), values, total * decay[:, None])
        highest = peak

    for start in tl.range(num_full, num_visible + num_queries - 1, KEYS):
        row = first_key + start
        scores = products(q_nope, q_rest, q_rope, k_nope_boxes, k_rest_boxes, k_rope_boxes, row, column, NOPE, REST)
        scores *= scale
        visible = (start + key_in_tile)[None, :] < (num_visible + query)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1))
        probs = tl.exp2(scores - peak[:, None])
        decay = tl.exp2(highest - peak)
        weight = weight * decay + tl.sum(probs, 1)
        values = value_boxes.load([row, column + NOPE + REST])
        total = tl.dot(probs.to(values.dtype), values, total * decay[:, None])
        highest = peak

    weight = tl.where(weight == 0.0, 1.0, weight)
    target = out_ptr + (first_token + query).to(tl.int64)[:, None] * out_stride + head * VALUE + tl.arange(0, VALUE)
    tl.store(target, total / weight[:, None], mask=(query < num_queries)[:, None])


@triton.jit
def products(
    q_nope,
    q_rest,
    q_rope,
    k_nope_boxes,
    k_rest_boxes,
    k_rope_boxes,
    row,
    column,
    NOPE: tl.constexpr,
    REST: tl.constexpr,
):
    """Return the products of a tile of queries and one of keys, which begins at `row`; the head begins at `column`."""
    k_nope = k_nope_boxes.load([row, column])
    k_rope = k_rope_boxes.load([row, 0])
    result = tl.dot(q_nope, k_nope.T, tl.dot(q_rope, k_rope.T))
    if REST > 0:
        result = tl.dot(q_rest, k_rest_boxes.load([row, column + NOPE]).T, result)
    return result

"""Decode attention of one short sequence, with or without drafts: a decode step of a lightly loaded engine.

Such a step only waits: for the queries, which the previous kernel writes, and for length, block ids and keys, which are
dependent reads. Only the queries and their own keys and values are written in this step, so everything else is read
while the previous kernels still run:

    program (split, head)   lengths ── block ids ── keys, values ──┐ wait ── queries, new keys ── weights ── sums
    previous kernel         ...... norm, rotation, KV write ───────┘

A program has KEYS keys of one KV head in its registers, and no loop. The last program has all new keys. The rows of its
products are the query heads that read the KV head, for one query after the other. A sequence with more than KEYS keys
has several programs per head; a second kernel, with a program for each query head, combines their parts. That is faster
than letting the last program find out that it is the last. The grid is sized for the longest sequence that counts as
short; programs without visible keys exit at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention_batch import SHORT_CONTEXTS, AttentionBatch
from baton.kernels.kv_rows import kv_rows
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous
from baton.kernels.split_kv import LOG2_E, LOWEST, sum_parts

from ..rule import AttentionRule
from .decode_options import MIN_ROWS
from .decode_output import capped, write_rows
from .decode_plan import ShortPlan, first_visible

MOST_ROWS = 32  # query heads that read one KV head, for all queries: sums must fit in registers
NEW_KEYS = 16  # new keys are padded to this many, the least that a product allows
KEYS = 128  # keys of a program
MOST_BYTES = 512  # largest key: a program's keys and values must fit in its registers
WARPS = 4  # for heads of up to 128 dimensions


def plan_short(
    batch: AttentionBatch, kv: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int
) -> ShortPlan | None:
    """Return the plan if the step has a single decode, or a single sequence with drafts, and it is short; else None.

    Reads shapes only.
    """
    queries = 1 if batch.num_decodes else batch.num_tokens
    if batch.num_decodes > 1 or (queries > 1 and not (batch.drafted and batch.num_seqs == 1)):
        return None
    if batch.max_seq_len > SHORT_CONTEXTS[-1] or queries > NEW_KEYS or head_dim * kv.itemsize > MOST_BYTES:
        return None
    if not 0 < queries * (num_heads // num_kv_heads) <= (MIN_ROWS if head_dim > 128 else MOST_ROWS):
        return None
    device, splits = batch.seq_lens.device, max(1, triton.cdiv(batch.max_seq_len, KEYS))
    return ShortPlan(
        sums=torch.empty((splits, queries, num_heads, value_dim), dtype=torch.float32, device=device),
        tops=torch.empty((2, splits, queries, num_heads), dtype=torch.float32, device=device),
    )


def short_decode(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: ShortPlan,
    rule: AttentionRule,
    *,
    out: Tensor,
) -> None:
    """Write the first rows of `out`: one for each query. See `baton.kernels.attention.paged_attention`."""
    num_heads, dim = q.shape[1:]
    num_kv_heads, splits, queries = kv.shape[1], plan.splits, plan.queries
    group = num_heads // num_kv_heads
    rows = kv_rows(kv, dim)
    padded_value_dim = triton.next_power_of_2(rows.value_dim)
    attend_split[(splits * num_kv_heads,)](
        q,
        kv,
        out,
        *(rule.sinks, rule.k_scale, rule.v_scale),
        plan.sums,
        plan.tops,
        batch.seq_lens,
        batch.query_start,
        batch.block_tables,
        batch.table_rows,
        layer,
        *(rule.scale, rule.limit, rule.cap),
        splits,
        q.stride(0),
        *kv.stride()[:3],
        rows.to_value,
        batch.block_tables.stride(0),
        HEADS=num_kv_heads,
        GROUP=group,
        QUERIES=queries,
        NEW=1 if queries == 1 else NEW_KEYS,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(queries * group)),
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        VALUE_DIM=rows.value_dim,
        PADDED_VALUE_DIM=padded_value_dim,
        TOKEN_STRIDE=rows.token_stride,
        KEYS=KEYS,
        BLOCK_SIZE=kv.shape[4],
        HAS_CAP=rule.has_cap,
        num_warps=warps_for(dim),
        **launch_options(),
    )
    if splits > 1:
        add_splits[(queries * num_heads,)](
            out,
            *(rule.sinks, rule.v_scale),
            plan.sums,
            plan.tops,
            batch.seq_lens,
            batch.query_start,
            rule.limit,
            splits,
            num_heads,
            QUERIES=queries,
            DIM=rows.value_dim,
            PADDED_DIM=padded_value_dim,
            KEYS=KEYS,
            MOST_SPLITS=triton.cdiv(SHORT_CONTEXTS[-1], KEYS),  # not this step's: one compiled kernel serves all
            num_warps=WARPS,
            **launch_options(),
        )


def warps_for(dim: int) -> int:
    """Return the number of warps of a program, whose registers must hold its keys and values."""
    return WARPS if dim <= 128 else 2 * WARPS


@triton.jit(do_not_specialize=["layer", "window", "num_splits", "table_width"])
def attend_split(
    q,  # [QUERIES, HEADS * GROUP, DIM]
    kv,
    out,  # [QUERIES, HEADS * GROUP, VALUE_DIM]
    sinks,
    k_scale,
    v_scale,
    sums,
    tops,
    seq_lens,
    query_start,
    block_tables,
    table_rows,
    layer,
    scale,
    window,
    soft_cap,
    num_splits,
    q_token_stride,
    kv_block_stride,
    kv_head_stride,
    kv_layer_stride,
    to_value,
    table_width,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # most queries
    NEW: tl.constexpr,  # number of new keys, with padding
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Attend to KEYS keys of the sequence, for one KV head and the GROUP query heads of each query that read it."""
    let_next_start()
    head = tl.program_id(0) % HEADS
    split = tl.program_id(0) // HEADS
    seq_len = tl.load(seq_lens)
    first_new = seq_len - _num_queries(seq_len, query_start, QUERIES)
    table = block_tables
    if table_rows is not None:
        table += tl.load(table_rows).to(tl.int64) * table_width
    key = split * KEYS + tl.arange(0, KEYS)
    # Loaded before the length is known. Ids after the sequence's end are not used.
    block = tl.load(table + key // BLOCK_SIZE, mask=key < table_width * BLOCK_SIZE, other=0).to(tl.int64)
    first_split, splits = _splits_of(seq_len, first_new, window, KEYS)
    if (split < first_split) | (split >= splits):
        return
    is_old = (key >= first_visible(first_new + 1, window)) & (key < first_new)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    kv_base = kv + head * kv_head_stride.to(tl.int64) + layer * kv_layer_stride.to(tl.int64)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    places = kv_base + (block * kv_block_stride + key % BLOCK_SIZE * TOKEN_STRIDE)[:, None]
    mask = is_old[:, None]
    if DIM != PADDED_DIM:
        mask = mask & (dim < DIM)
    k = tl.load(places + dim, mask=mask, other=0.0)
    value_mask = is_old[:, None]
    if VALUE_DIM != PADDED_VALUE_DIM:
        value_mask = value_mask & (value_dim < VALUE_DIM)
    v = tl.load(places + to_value + value_dim, mask=value_mask, other=0.0)
    new = first_new
    if NEW > 1:
        new += tl.arange(0, NEW)
    is_new = new < tl.where(split == splits - 1, seq_len, 0)
    new_block = tl.load(table + new // BLOCK_SIZE, mask=is_new, other=0).to(tl.int64)
    new_places = kv_base + new_block * kv_block_stride + new % BLOCK_SIZE * TOKEN_STRIDE
    rows = row // GROUP * q_token_stride + (head * GROUP + row % GROUP) * DIM
    is_real = row < QUERIES * GROUP
    position = first_new + row // GROUP
    wait_for_previous()

    if k_scale is not None:
        scale *= tl.load(k_scale)
    query = tl.load(q + rows[:, None] + dim, mask=is_real[:, None] & (dim < DIM), other=0.0)
    new_k = _new_rows(new_places, is_new, NEW, DIM, PADDED_DIM)
    new_v = _new_rows(new_places + to_value, is_new, NEW, VALUE_DIM, PADDED_VALUE_DIM)
    scores = tl.dot(query, k.to(query.dtype).T, input_precision="ieee") * scale
    if NEW == 1:
        new_scores = tl.sum(query.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    else:
        new_scores = tl.dot(query, new_k.to(query.dtype).T, input_precision="ieee") * scale
    if HAS_CAP:
        scores = capped(scores, soft_cap)
        new_scores = capped(new_scores, soft_cap)
    is_seen, new_is_seen = is_old[None, :], is_new
    if QUERIES > 1:
        first_key = first_visible(position + 1, window)[:, None]
        is_query = (position < seq_len)[:, None]
        is_seen = is_seen & is_query & (key[None, :] >= first_key)
        new_is_seen = is_new[None, :] & is_query & (new[None, :] >= first_key) & (new[None, :] <= position[:, None])
    scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
    new_scores = tl.where(new_is_seen, new_scores * LOG2_E, float("-inf"))
    top = tl.maximum(tl.max(scores, 1), LOWEST)
    if NEW == 1:  # one score per row
        top = tl.maximum(top, new_scores)
        weights, new_weights = tl.exp2(scores - top[:, None]), tl.exp2(new_scores - top)
        weight = tl.sum(weights, 1) + new_weights
    else:
        top = tl.maximum(top, tl.max(new_scores, 1))
        weights, new_weights = tl.exp2(scores - top[:, None]), tl.exp2(new_scores - top[:, None])
        weight = tl.sum(weights, 1) + tl.sum(new_weights, 1)
    total = tl.dot(weights.to(query.dtype), v.to(query.dtype), input_precision="ieee")
    if NEW == 1:
        total += new_weights[:, None] * new_v.to(tl.float32)
    else:
        total = tl.dot(new_weights.to(query.dtype), new_v.to(query.dtype), total, input_precision="ieee")
    if splits - first_split == 1:
        place = out + head * (GROUP * VALUE_DIM)
        stride = HEADS * GROUP * VALUE_DIM
        write_rows(total, weight, top, place, sinks, v_scale, head, GROUP, VALUE_DIM, stride, QUERIES)
    else:
        part = ((split * QUERIES + row // GROUP) * HEADS + head) * GROUP + row % GROUP
        is_value = is_real[:, None] & (value_dim < VALUE_DIM)
        tl.store(sums + part[:, None] * VALUE_DIM + value_dim, total, mask=is_value)
        tl.store(tops + part, top, mask=is_real)
        tl.store(tops + num_splits * (QUERIES * HEADS * GROUP) + part, weight, mask=is_real)


@triton.jit(do_not_specialize=["window", "num_splits", "num_heads"])
def add_splits(
    out,
    sinks,
    v_scale,
    sums,
    tops,
    seq_lens,
    query_start,
    window,
    num_splits,
    num_heads,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """Combine the splits of one head of a query."""
    let_next_start()
    row = tl.program_id(0)
    seq_len = tl.load(seq_lens)
    first_new = seq_len - _num_queries(seq_len, query_start, QUERIES)
    first_split, splits = _splits_of(seq_len, first_new, window, KEYS)
    split = tl.arange(0, MOST_SPLITS)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    is_there = (split >= first_split) & (split < splits)
    num_rows = QUERIES * num_heads
    part = split * num_rows + row
    wait_for_previous()
    if splits - first_split > 1:
        tops_here = tl.load(tops + part, mask=is_there, other=LOWEST)
        weights = tl.load(tops + num_splits * num_rows + part, mask=is_there, other=0.0)
        values = tl.load(sums + part[:, None] * DIM + dim, mask=is_there[:, None] & (dim < DIM), other=0.0)
        total, weight, top = sum_parts(values, weights, tops_here)
        only = tl.zeros([1], tl.float32)
        place = out + row * DIM
        write_rows(total[None, :], weight + only, top + only, place, sinks, v_scale, row % num_heads, 1, DIM)


@triton.jit
def _new_rows(places, is_new, NEW: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Load the keys or values of new tokens: [NEW, PADDED_DIM].

    For a single new token, `places` and `is_new` are scalars: tensors with one row are slower to load and to reduce.
    """
    dim = tl.arange(0, PADDED_DIM)
    if NEW == 1:
        rows = tl.load(places + dim, mask=dim < tl.where(is_new, DIM, 0), other=0.0)[None, :]
    else:
        rows = tl.load(places[:, None] + dim[None, :], mask=is_new[:, None] & (dim < DIM)[None, :], other=0.0)
    return rows


@triton.jit
def _num_queries(seq_len, query_start, QUERIES: tl.constexpr):
    """Return how many of a sequence's tokens are in this step; 0 for padding."""
    count = 1
    if QUERIES > 1:
        count = tl.load(query_start + 1) - tl.load(query_start)
    return tl.minimum(count, seq_len)


@triton.jit
def _splits_of(seq_len, first_new, window, KEYS: tl.constexpr):
    """Return the range of splits with visible keys; at least one split, even without keys.

    `first_new` is the position of the first query.
    """
    return first_visible(first_new + 1, window) // KEYS, tl.maximum(tl.cdiv(seq_len, KEYS), 1)

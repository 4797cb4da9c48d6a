"""Decode attention of one short sequence: a decode step of a lightly loaded engine.

Nothing here is slow but waiting: for the query, which the kernel before writes, and for lengths, block ids and keys,
each of which says where the next lies. Only the query and the newest key and value come from this step, so all else is
read while the kernels before still run:

    program (split, head)   lengths ── block ids ── keys, values ──┐ wait ── query, newest key ── weights ── sums
    kernel before           ...... norm, rotation, KV write ───────┘

A program has KEYS keys of one KV head, whole in its registers, and no loop. A sequence that is longer has several
programs a head, whose parts a second kernel adds up, a program for each query head: that is faster than a last program
that finds out that it is the last. The grid is that of the longest sequence that is short; programs without a key that
the query sees leave at once.
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
from .decode_output import capped, write_rows
from .decode_plan import ShortPlan, first_visible

ROWS = 16  # of a matrix product: query heads that read one KV head, at most
KEYS = 128  # of a program
MOST_DIMS = 256  # of a head: a program's keys and values lie in its registers
WARPS = 4  # for heads of up to 128 dimensions


def plan_short(
    batch: AttentionBatch, *, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int
) -> ShortPlan | None:
    """Return the plan of a step whose only decode is one short sequence, else None. Looks at shapes only."""
    if batch.num_decodes != 1 or batch.max_seq_len > SHORT_CONTEXTS[-1] or num_heads // num_kv_heads > ROWS:
        return None
    if head_dim > MOST_DIMS:
        return None
    device, splits = batch.seq_lens.device, max(1, triton.cdiv(batch.max_seq_len, KEYS))
    return ShortPlan(
        sums=torch.empty((splits, num_heads, value_dim), dtype=torch.float32, device=device),
        tops=torch.empty((2, splits, num_heads), dtype=torch.float32, device=device),
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
    """Write the first row of `out`. See `baton.kernels.attention.paged_attention`."""
    num_heads, dim = q.shape[1:]
    num_kv_heads, splits = kv.shape[1], plan.splits
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
        batch.block_tables,
        batch.table_rows,
        layer,
        *(rule.scale, rule.limit, rule.cap),
        splits,
        *kv.stride()[:3],
        rows.to_value,
        batch.block_tables.stride(0),
        HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        ROWS=ROWS,
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
        add_splits[(num_heads,)](
            out,
            *(rule.sinks, rule.v_scale),
            plan.sums,
            plan.tops,
            batch.seq_lens,
            rule.limit,
            splits,
            num_heads,
            DIM=rows.value_dim,
            PADDED_DIM=padded_value_dim,
            KEYS=KEYS,
            MOST_SPLITS=triton.cdiv(SHORT_CONTEXTS[-1], KEYS),  # whatever this step has: one kernel serves all
            num_warps=WARPS,
            **launch_options(),
        )


def warps_for(dim: int) -> int:
    """Return the warps of a program: its keys and values lie in their registers."""
    return WARPS if dim <= 128 else 2 * WARPS


@triton.jit(do_not_specialize=["layer", "window", "num_splits", "table_width"])
def attend_split(
    q,  # [1, HEADS * GROUP, DIM]
    kv,
    out,  # [1, HEADS * GROUP, VALUE_DIM]
    sinks,
    k_scale,
    v_scale,
    sums,
    tops,
    seq_lens,
    block_tables,
    table_rows,
    layer,
    scale,
    window,
    soft_cap,
    num_splits,
    kv_block_stride,
    kv_head_stride,
    kv_layer_stride,
    to_value,
    table_width,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
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
    """Attend KEYS keys of the sequence, for one KV head and the GROUP query heads that read it."""
    let_next_start()
    head = tl.program_id(0) % HEADS
    split = tl.program_id(0) // HEADS
    seq_len = tl.load(seq_lens)
    table = block_tables
    if table_rows is not None:
        table += tl.load(table_rows).to(tl.int64) * table_width
    key = split * KEYS + tl.arange(0, KEYS)
    # whatever the length is: asked for before that is there. Ids behind the sequence's end are not used.
    block = tl.load(table + key // BLOCK_SIZE, mask=key < table_width * BLOCK_SIZE, other=0).to(tl.int64)
    first_split, splits = _splits_of(seq_len, window, KEYS)
    if (split < first_split) | (split >= splits):
        return
    newest = seq_len - 1
    is_old = (key >= first_visible(seq_len, window)) & (key < newest)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    kv_base = kv + head * kv_head_stride.to(tl.int64) + layer * kv_layer_stride.to(tl.int64)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    places = kv_base + (block * kv_block_stride + key % BLOCK_SIZE * TOKEN_STRIDE)[:, None]
    mask = is_old[:, None]
    if DIM != PADDED_DIM:
        mask = mask & (dim < DIM)[None, :]
    k = tl.load(places + dim[None, :], mask=mask, other=0.0)
    value_mask = is_old[:, None]
    if VALUE_DIM != PADDED_VALUE_DIM:
        value_mask = value_mask & (value_dim < VALUE_DIM)[None, :]
    v = tl.load(places + to_value + value_dim[None, :], mask=value_mask, other=0.0)
    has_newest = (split == splits - 1) & (seq_len > 0)
    newest_block = tl.load(table + newest // BLOCK_SIZE, mask=has_newest, other=0).to(tl.int64)
    newest_place = kv_base + newest_block * kv_block_stride + newest % BLOCK_SIZE * TOKEN_STRIDE
    head_dims = (head * GROUP + row)[:, None] * DIM + dim[None, :]
    is_real = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    wait_for_previous()

    if k_scale is not None:
        scale *= tl.load(k_scale)
    query = tl.load(q + head_dims, mask=is_real, other=0.0)
    newest_mask = dim < tl.where(has_newest, DIM, 0)
    new_k = tl.load(newest_place + dim, mask=newest_mask, other=0.0).to(tl.float32)
    newest_value_mask = value_dim < tl.where(has_newest, VALUE_DIM, 0)
    new_v = tl.load(newest_place + to_value + value_dim, mask=newest_value_mask, other=0.0).to(tl.float32)
    scores = tl.dot(query, k.to(query.dtype).T, input_precision="ieee") * scale
    new_score = tl.sum(query.to(tl.float32) * new_k[None, :], 1) * scale
    if HAS_CAP:
        scores = capped(scores, soft_cap)
        new_score = capped(new_score, soft_cap)
    scores = tl.where(is_old[None, :], scores * LOG2_E, float("-inf"))
    new_score = tl.where(has_newest, new_score * LOG2_E, float("-inf"))
    top = tl.maximum(tl.maximum(tl.max(scores, 1), new_score), LOWEST)
    weights = tl.exp2(scores - top[:, None])
    new_weight = tl.exp2(new_score - top)
    weight = tl.sum(weights, 1) + new_weight
    total = tl.dot(weights.to(query.dtype), v.to(query.dtype), input_precision="ieee")
    total += new_weight[:, None] * new_v[None, :]
    if splits - first_split == 1:
        write_rows(total, weight, top, out + head * (GROUP * VALUE_DIM), sinks, v_scale, head, GROUP, VALUE_DIM)
    else:
        part = (split * HEADS + head) * GROUP + row
        is_value = (row < GROUP)[:, None] & (value_dim < VALUE_DIM)[None, :]
        tl.store(sums + part[:, None] * VALUE_DIM + value_dim[None, :], total, mask=is_value)
        tl.store(tops + part, top, mask=row < GROUP)
        tl.store(tops + num_splits * HEADS * GROUP + part, weight, mask=row < GROUP)


@triton.jit(do_not_specialize=["window", "num_splits", "num_heads"])
def add_splits(
    out,
    sinks,
    v_scale,
    sums,
    tops,
    seq_lens,
    window,
    num_splits,
    num_heads,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """Combine the splits of one query head of a sequence."""
    let_next_start()
    head = tl.program_id(0)
    first_split, splits = _splits_of(tl.load(seq_lens), window, KEYS)
    split = tl.arange(0, MOST_SPLITS)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    is_there = (split >= first_split) & (split < splits)
    part = split * num_heads + head
    wait_for_previous()
    if splits - first_split > 1:
        tops_here = tl.load(tops + part, mask=is_there, other=LOWEST)
        weights = tl.load(tops + num_splits * num_heads + part, mask=is_there, other=0.0)
        values = tl.load(sums + part[:, None] * DIM + dim, mask=is_there[:, None] & (dim < DIM), other=0.0)
        total, weight, top = sum_parts(values, weights, tops_here)
        only = tl.zeros([1], tl.float32)
        write_rows(total[None, :], weight + only, top + only, out + head * DIM, sinks, v_scale, head, 1, DIM)


@triton.jit
def _splits_of(seq_len, window, KEYS: tl.constexpr):
    """Return the first split with a key that the newest token sees, and the end of those; one also where there is no
    key.
    """
    return first_visible(seq_len, window) // KEYS, tl.maximum(tl.cdiv(seq_len, KEYS), 1)

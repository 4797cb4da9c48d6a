"""Attention of one short sequence with one query token: a decode step of a lightly loaded engine.

Nothing here is slow but waiting: for the query, which the kernel before writes, and for lengths, block ids and keys,
each of which says where the next lies. Only the query and the newest key and value come from this step, so all else is
read while the kernels before still run:

    program (split, head)   lengths ── block ids ── keys, values ──┐ wait ── query, newest key ── weights ── result
    kernel before           ...... norm, rotation, KV write ───────┘

A program has KEYS keys of one KV head, whole in its registers, and no loop. A sequence that is longer than that has
several programs a head; the last of them to arrive adds up the parts. The grid is that of the longest sequence that is
short: programs behind the sequence's end leave at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous

from ..batch import SHORT_CONTEXTS, AttentionBatch
from .decode_sums import LOG2_E, LOWEST, combine, write_rows
from .plan import UNLIMITED, ShortPlan, first_visible

MIN_ROWS = 16  # of a matrix product
MOST_ROWS = 16  # query heads that read one KV head: all that one product takes
KEYS = 128  # of a program
WARPS = 4
ELEMENTS_AT_ONCE = 8192  # of the partial sums, when they are put together


def plan_short(batch: AttentionBatch, *, num_heads: int, num_kv_heads: int, head_dim: int) -> ShortPlan | None:
    """The plan of a step whose only decode is one short sequence, else None. Looks at shapes only."""
    if batch.num_decodes != 1 or batch.max_seq_len > SHORT_CONTEXTS[-1] or num_heads // num_kv_heads > MOST_ROWS:
        return None
    device, splits = batch.seq_lens.device, max(1, triton.cdiv(batch.max_seq_len, KEYS))
    return ShortPlan(
        splits,
        sums=torch.empty((splits, 2, num_heads, head_dim), dtype=torch.float32, device=device),
        tops=torch.empty((2, splits, 2, num_heads), dtype=torch.float32, device=device),
        arrivals=torch.zeros(num_kv_heads, dtype=torch.int32, device=device),
    )


def short_decode(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: ShortPlan,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
) -> None:
    """Writes the first row of `out`. See `baton.kernels.attention.paged_attention`."""
    num_heads, dim = q.shape[1:]
    num_kv_heads = kv.shape[1]
    group, padded_dim = num_heads // num_kv_heads, triton.next_power_of_2(dim)
    padded_group = triton.next_power_of_2(group)
    attend_short[(plan.splits * num_kv_heads,)](
        q,
        kv,
        out,
        sinks,
        k_scale,
        v_scale,
        plan.sums,
        plan.tops,
        plan.arrivals,
        batch.seq_lens,
        batch.block_tables,
        batch.table_rows,
        layer,
        scale,
        UNLIMITED if window is None else window,
        soft_cap or 0.0,
        plan.splits,
        *(kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3)),
        batch.block_tables.stride(0),
        HEADS=num_kv_heads,
        GROUP=group,
        PADDED_GROUP=padded_group,
        ROWS=MIN_ROWS,
        DIM=dim,
        PADDED_DIM=padded_dim,
        KEYS=KEYS,
        PARTS=max(1, ELEMENTS_AT_ONCE // (padded_group * padded_dim)),
        BLOCK_SIZE=kv.shape[4],
        HAS_CAP=soft_cap is not None,
        num_warps=WARPS,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["layer", "window", "num_splits", "table_stride"])
def attend_short(
    q,  # [1, HEADS * GROUP, DIM]
    kv,
    out,  # as q
    sinks,
    k_scale,
    v_scale,
    sums,
    tops,
    arrivals,
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
    kv_half_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """KEYS keys of the sequence, for one KV head and the GROUP query heads that read it."""
    let_next_start()
    head = tl.program_id(0) % HEADS
    split = tl.program_id(0) // HEADS
    seq_len = tl.load(seq_lens)
    splits = tl.maximum(tl.cdiv(seq_len, KEYS), 1)
    if split >= splits:
        return
    table = block_tables
    if table_rows is not None:
        table += tl.load(table_rows).to(tl.int64) * table_stride
    first_key = first_visible(seq_len, window)
    newest = seq_len - 1
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    key = split * KEYS + tl.arange(0, KEYS)
    is_old = (key >= first_key) & (key < newest)
    kv_base = kv + head * kv_head_stride.to(tl.int64) + layer * kv_layer_stride.to(tl.int64)
    block = tl.load(table + key // BLOCK_SIZE, mask=is_old, other=0).to(tl.int64)
    places = kv_base + (block * kv_block_stride + key % BLOCK_SIZE * DIM)[:, None] + dim[None, :]
    mask = is_old[:, None]
    if DIM != PADDED_DIM:
        mask = mask & (dim < DIM)[None, :]
    k = tl.load(places, mask=mask, other=0.0)
    v = tl.load(places + kv_half_stride, mask=mask, other=0.0)
    has_newest = (split == splits - 1) & (seq_len > 0)
    newest_block = tl.load(table + newest // BLOCK_SIZE, mask=has_newest, other=0).to(tl.int64)
    newest_place = kv_base + newest_block * kv_block_stride + newest % BLOCK_SIZE * DIM + dim
    head_dims = (head * GROUP + row)[:, None] * DIM + dim[None, :]
    is_real = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    wait_for_previous()

    if k_scale is not None:
        scale *= tl.load(k_scale)
    query = tl.load(q + head_dims, mask=is_real, other=0.0)
    newest_mask = dim < tl.where(has_newest, DIM, 0)
    new_k = tl.load(newest_place, mask=newest_mask, other=0.0).to(tl.float32)
    new_v = tl.load(newest_place + kv_half_stride, mask=newest_mask, other=0.0).to(tl.float32)
    scores = tl.dot(query, k.to(query.dtype).T, input_precision="ieee") * scale
    new_score = tl.sum(query.to(tl.float32) * new_k[None, :], 1) * scale
    if HAS_CAP:
        scores = _capped(scores, soft_cap)
        new_score = _capped(new_score, soft_cap)
    scores = tl.where(is_old[None, :], scores * LOG2_E, float("-inf"))
    new_score = tl.where(has_newest, new_score * LOG2_E, float("-inf"))
    top = tl.maximum(tl.maximum(tl.max(scores, 1), new_score), LOWEST)
    weights = tl.exp2(scores - top[:, None])
    new_weight = tl.exp2(new_score - top)
    weight = tl.sum(weights, 1) + new_weight
    total = tl.dot(weights.to(query.dtype), v.to(query.dtype), input_precision="ieee")
    total += new_weight[:, None] * new_v[None, :]

    place = out + head * (GROUP * DIM)
    if splits == 1:
        write_rows(total, weight, top, place, sinks, v_scale, head, GROUP, DIM)
        return
    part = ((split * 2 + (split == 0).to(tl.int32)) * HEADS + head) * GROUP
    tl.store(sums + (part + row)[:, None] * DIM + dim[None, :], total, mask=is_real)
    tl.store(tops + part + row, top, mask=row < GROUP)
    tl.store(tops + num_splits * 2 * HEADS * GROUP + part + row, weight, mask=row < GROUP)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(arrivals + head, 1, sem="acq_rel") == splits - 1:
        tl.store(arrivals + head, 0)  # for the next layer
        combine(
            sums,
            tops,
            0,
            splits - 1,
            num_splits,
            place,
            sinks,
            v_scale,
            head,
            HEADS=HEADS,
            GROUP=GROUP,
            PADDED_GROUP=PADDED_GROUP,
            DIM=DIM,
            PADDED_DIM=PADDED_DIM,
            PARTS=PARTS,
        )


@triton.jit
def _capped(scores, soft_cap):
    """cap * tanh(score / cap), where tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    return soft_cap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E / soft_cap)) + 1))

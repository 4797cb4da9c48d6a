"""Split-KV prefill attention, for so few query tokens that one program per tile would leave most of the device idle.

    a tile of queries, its keys       |   0   |   1   |   2   |   3   |   4   |       tiles of KEYS keys
    splits                            |  split 0      |  split 1      |split 2|       a program each

A prompt of a hundred tokens mostly waits for memory. So programs start early, and small tiles make many programs. A
tile with few keys has one program. The keys of a chunk after a long context are split: programs store their parts in a
workspace, and the last one to arrive combines them, in the order of the splits.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.arrivals import is_last_to_arrive
from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.kv_rows import kv_rows
from baton.kernels.launch import multiprocessors
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous
from baton.kernels.query_tiles import ITEM_WORDS, SHORT_ROWS, KeySplit, PrefillPlan, num_units_of, plan_prefill
from baton.kernels.split_kv import LOG2_E, LOWEST, merge_part

from ..rule import AttentionRule
from .prefill_tiles import attend_keys, read_item, row_places, tile_options, units_of_stored, weighted_mean

PROGRAMS = 2  # concurrent programs of a multiprocessor
LEAST_SPLITS = 3  # with fewer splits, long tiles, which multiply faster, win at 32k keys
MOST_SPLITS = 16
LEAST_KEYS = 256  # of a split: with fewer, another program costs more than it saves


def plan_split_prefill(
    batch: AttentionBatch, first_seq: int, *, num_heads: int, num_kv_heads: int, head_dim: int, value_dim: int
) -> PrefillPlan | None:
    """Plan as `plan_prefill` does, but with split keys; None if too few splits fit the device. Reads shapes only.

    The attention kernel reads the tiles before it waits for its predecessor. That is safe because a kernel that clears
    the workspace is launched between the kernel that writes the tiles and the attention kernel.
    """
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    units = num_units_of(batch, first_seq, SHORT_ROWS, num_heads, num_kv_heads)
    splits = min(MOST_SPLITS, PROGRAMS * multiprocessors(batch.query_start.device) // units)
    if splits < LEAST_SPLITS:
        return None
    plan = plan_prefill(batch, first_seq, **heads, rows=SHORT_ROWS)
    return dataclasses.replace(plan, split=key_split(plan, num_heads, value_dim, splits))


def key_split(plan: PrefillPlan, num_heads: int, value_dim: int, splits: int) -> KeySplit:
    device, units = plan.items.device, plan.num_items * (num_heads // plan.pack)
    sums = (units, splits, plan.rows, triton.next_power_of_2(value_dim))
    return KeySplit(
        splits,
        sums=torch.empty(sums, dtype=torch.float32, device=device),
        tops=torch.empty((units, splits, 2, plan.rows), dtype=torch.float32, device=device),
        arrivals=torch.zeros(units, dtype=torch.int32, device=device),
    )


def prefill_split_kv(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: PrefillPlan,
    split: KeySplit,
    rule: AttentionRule,
    *,
    out: Tensor,
) -> None:
    """See `gpu.paged_prefill`."""
    num_heads = q.shape[1]
    attend_key_split[(plan.num_items * (num_heads // plan.pack) * split.count,)](
        q,
        kv,
        out,
        *(rule.sinks, rule.k_scale, rule.v_scale),
        plan.items,
        plan.num_tiles,
        split.sums,
        split.tops,
        split.arrivals,
        batch.block_tables,
        layer,
        *(rule.score_unit, rule.cap_scale, rule.limit),
        num_heads,
        split.count,
        *q.stride()[:2],
        *out.stride()[:2],
        *kv.stride()[:3],
        kv_rows(kv, q.shape[2]).to_value,
        batch.block_tables.stride(0),
        LEAST_KEYS=LEAST_KEYS,
        **tile_options(q, kv, plan, rule),
        **launch_options(),
    )


@triton.jit(do_not_specialize=["layer", "window", "num_splits"])
def attend_key_split(
    q,
    kv,
    out,
    sinks,
    k_scale,
    v_scale,
    items,
    num_tiles,
    sums,
    tops,
    arrivals,
    block_tables,
    layer,
    score_unit,
    cap_scale,
    window,
    num_heads,
    num_splits,
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
    LEAST_KEYS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Attend to one split of the keys of one tile of queries. Programs of one KV head are neighbours, to share L2."""
    let_next_start()
    tile = tl.program_id(0) % tl.load(num_tiles)
    place = tl.program_id(0) // tl.load(num_tiles)
    first_head, split = place % (num_heads // PACK) * PACK, place // (num_heads // PACK)
    token, count, first_position, table = read_item(items + tile * ITEM_WORDS, block_tables, table_stride)
    num_keys = first_position + count
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(first_position + 1 - window, 0) // KEYS * KEYS
    of_split = tl.maximum(tl.cdiv(tl.cdiv(num_keys - first_key, KEYS), num_splits) * KEYS, LEAST_KEYS)
    splits = tl.maximum(tl.cdiv(num_keys - first_key, of_split), 1)
    wait_for_previous()
    if split >= splits:
        return

    row = tl.arange(0, ROWS)
    row_token, row_head = row // PACK, first_head + row % PACK
    dim = tl.arange(0, PADDED_DIM)
    is_real = (row_token < count)[:, None] & (dim < DIM)[None, :]
    source = row_places(q, token + row_token, row_head, q_token_stride, q_head_stride, PADDED_DIM)
    query = tl.load(source, mask=is_real, other=0.0)
    score_unit, cap_scale = units_of_stored(score_unit, cap_scale, k_scale, HAS_CAP)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None and split == 0:
        top = tl.load(sinks + row_head) * LOG2_E / score_unit
        total += 1.0
    k_base = kv + layer.to(tl.int64) * layer_stride + first_head // GROUP * head_stride
    first_key += split * of_split
    acc, total, top = attend_keys(
        tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32),
        total,
        top,
        query,
        first_position + row_token,
        k_base,
        k_base + to_value,
        table,
        block_stride,
        first_key,
        tl.minimum(first_key + of_split, num_keys),
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
        True,
        HAS_WINDOW,
        HAS_CAP,
    )
    is_last = splits == 1
    if splits > 1:
        unit = tile * (num_heads // PACK) + first_head // PACK
        _store_part(acc, total, top * score_unit, sums, tops, unit * num_splits + split)
        is_last = is_last_to_arrive(arrivals + unit, splits - 1)
        if is_last:
            acc, total = _merge_parts(sums, tops, unit * num_splits, splits, ROWS, PADDED_VALUE_DIM)
    if is_last:
        result = weighted_mean(acc, total, v_scale)
        target = row_places(out, token + row_token, row_head, out_token_stride, out_head_stride, PADDED_VALUE_DIM)
        mask = (row_token < count)[:, None] & (tl.arange(0, PADDED_VALUE_DIM) < VALUE_DIM)[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(acc, total, top, sums, tops, part):
    """Store the part of one split. Top scores are in units of log 2."""
    row = tl.arange(0, acc.shape[0])
    dim = tl.arange(0, acc.shape[1])
    tl.store(sums + (part.to(tl.int64) * acc.shape[0] + row)[:, None] * acc.shape[1] + dim[None, :], acc)
    tl.store(tops + part * 2 * acc.shape[0] + row, top)
    tl.store(tops + (part * 2 + 1) * acc.shape[0] + row, total)


@triton.jit
def _merge_parts(sums, tops, first_part, splits, ROWS: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Return the sums of values and of weights of a tile whose `splits` parts have all been stored."""
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    tops += first_part * 2 * ROWS
    sums += first_part.to(tl.int64) * (ROWS * PADDED_DIM)
    for part in tl.range(splits):
        # bypass L1: other multiprocessors wrote these
        part_top = tl.load(tops + part * 2 * ROWS + row, cache_modifier=".cg")
        part_total = tl.load(tops + (part * 2 + 1) * ROWS + row, cache_modifier=".cg")
        place = sums + (part * ROWS + row)[:, None] * PADDED_DIM + dim[None, :]
        part_acc = tl.load(place, cache_modifier=".cg")
        acc, total, top = merge_part(acc, total, top, part_acc, part_total, part_top, 1)
    return acc, total

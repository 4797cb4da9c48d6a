"""Decode attention for any GPU, head size and cache type.

Each sequence has one query token, or a few: its last known token, and drafts. The kernel is memory-bound: every key and
value is read once, and the difficulty is to keep enough reads in flight.

* The query heads that read the same KV head, for one query after the other, are the rows of one small matrix product,
  padded to the 16 rows that it needs.
* Programs have equal shares of the keys of the whole step (`decode_plan.py`). A program processes its share sequence by
  sequence, and unit by unit within a sequence, while the next units are being loaded.
* A short step is a chain of dependent reads: share, page, key. So a program prefetches its first pages while the
  previous kernel still runs: they are in L2 when the query is ready.
* If a sequence lies in one share, its result is written directly. If it lies in several, its parts are combined in the
  order of the shares, by the program that finishes last, or by a second kernel if the plan says so (`decode_combine`).

Scores are in units of log 2, since the device's exponential has base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.arrivals import is_last_to_arrive
from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.kv_rows import kv_rows
from baton.kernels.pdl import launch_options, let_next_start, prefetch, wait_for_previous
from baton.kernels.split_kv import LOG2_E, LOWEST

from ..rule import AttentionRule
from .decode_combine import add_parts, combine_parts
from .decode_options import MIN_ROWS
from .decode_output import capped, write_rows
from .decode_plan import (
    FIRST_SEQ,
    FIRST_UNIT,
    NUM_UNITS,
    SHARE_WORDS,
    UNITS_PER_SHARE,
    DecodePlan,
    first_visible,
    part_number,
    units_of,
)

LINE_BYTES = tl.constexpr(128)  # bytes that one prefetch loads
ELEMENTS_AT_ONCE = 2048  # of partial sums while combining: registers are shared with the main loop


def paged_decode(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: DecodePlan,
    rule: AttentionRule,
    *,
    out: Tensor,
) -> None:
    """Write the rows of `out` that the plan covers. See `baton.kernels.attention.paged_attention`."""
    num_heads, dim = q.shape[1:]
    shares = plan.shares(rule.limit)
    group = num_heads // plan.num_kv_heads
    rows = kv_rows(kv, dim)
    padded_rows = triton.next_power_of_2(plan.queries * group)
    padded_value_dim = triton.next_power_of_2(rows.value_dim)
    attend_share[(shares.num_shares * plan.num_kv_heads,)](
        q,
        kv,
        out,
        *(rule.sinks, rule.k_scale, rule.v_scale),
        shares.words,
        shares.arrivals,
        plan.sums,
        plan.tops,
        batch.seq_lens,
        batch.query_start,
        batch.block_tables,
        batch.table_rows,
        layer,
        *(rule.scale, plan.reach(rule.limit), rule.cap),
        *(shares.num_shares, plan.num_seqs, batch.num_tokens),
        q.stride(0),
        *kv.stride()[:3],
        rows.to_value,
        batch.block_tables.stride(0),
        HEADS=plan.num_kv_heads,
        GROUP=group,
        QUERIES=plan.queries,
        PADDED_ROWS=padded_rows,
        ROWS=max(MIN_ROWS, padded_rows),
        DIM=dim,
        PADDED_DIM=triton.next_power_of_2(dim),
        VALUE_DIM=rows.value_dim,
        PADDED_VALUE_DIM=padded_value_dim,
        TOKEN_STRIDE=rows.token_stride,
        UNIT=shares.unit_tokens,
        EARLY_UNITS=plan.early_units,
        PARTS=max(1, ELEMENTS_AT_ONCE // (padded_rows * padded_value_dim)),
        APART=plan.apart,
        BLOCK_SIZE=kv.shape[4],
        HAS_CAP=rule.has_cap,
        **plan.options,
        **launch_options(),
    )
    if plan.apart:
        add_parts(out[: batch.num_decodes], plan, shares, rule)


@triton.jit(do_not_specialize=["layer", "window", "num_shares", "num_seqs", "num_tokens", "table_stride"])
def attend_share(
    q,
    kv,
    out,
    sinks,
    k_scale,
    v_scale,
    words,
    arrivals,
    sums,
    tops,
    seq_lens,
    query_start,
    block_tables,
    table_rows,
    layer,
    scale,
    window,  # keys that a sequence's queries see together: the window of one, plus the number of later queries
    soft_cap,
    num_shares,
    num_seqs,
    num_tokens,
    q_token_stride,
    kv_block_stride,
    kv_head_stride,
    kv_layer_stride,
    to_value,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,  # most queries of a sequence
    PADDED_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
    EARLY_UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Attend to one share of the keys, for one KV head and the GROUP heads of each query that read it."""
    let_next_start()
    head = tl.program_id(0) % HEADS
    share = tl.program_id(0) // HEADS
    seq = tl.load(words + share * SHARE_WORDS + FIRST_SEQ)
    unit = tl.load(words + share * SHARE_WORDS + FIRST_UNIT)
    count = tl.load(words + share * SHARE_WORDS + NUM_UNITS)
    per_share = tl.load(words + share * SHARE_WORDS + UNITS_PER_SHARE)
    kv_base = kv + head * kv_head_stride.to(tl.int64) + layer * kv_layer_stride.to(tl.int64)
    seq_len, table = _sequence(seq, count > 0, seq_lens, block_tables, table_rows, table_stride)
    if EARLY_UNITS > 0 and count > 0:
        begin, end = _keys_of(seq_len, window, unit, tl.minimum(count, EARLY_UNITS), UNIT)
        key = begin + tl.arange(0, EARLY_UNITS * UNIT)
        place = kv_base + _places(key, key < end, table, kv_block_stride, BLOCK_SIZE, TOKEN_STRIDE)
        _prefetch_rows(place, DIM)
        _prefetch_rows(place + to_value, VALUE_DIM)
    wait_for_previous()

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    rows: tl.constexpr = QUERIES * GROUP
    head_dims = ((head * GROUP + row % GROUP) * DIM + row // GROUP * q_token_stride)[:, None] + dim
    value_dim = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    is_value = (row < rows)[:, None] & (value_dim < VALUE_DIM)
    out_stride: tl.constexpr = HEADS * GROUP * VALUE_DIM
    if k_scale is not None:
        scale *= tl.load(k_scale)
    left = count
    while left > 0:
        first_token, num_queries = _queries_of(seq, query_start, QUERIES)
        is_real = (row < num_queries * GROUP)[:, None] & (dim < DIM)
        query = tl.load(q + first_token.to(tl.int64) * q_token_stride + head_dims, mask=is_real, other=0.0)
        all_units = units_of(seq_len, window, UNIT)
        units = tl.minimum(all_units - unit, left)
        begin, end = _keys_of(seq_len, window, unit, units, UNIT)
        total, weight, top = _attend_keys(
            query,
            kv_base,
            table,
            seq_len - num_queries + row // GROUP,
            window - (QUERIES - 1),
            begin,
            end,
            kv_block_stride,
            to_value,
            scale,
            soft_cap,
            QUERIES=QUERIES,
            ROWS=ROWS,
            DIM=DIM,
            PADDED_DIM=PADDED_DIM,
            VALUE_DIM=VALUE_DIM,
            PADDED_VALUE_DIM=PADDED_VALUE_DIM,
            TOKEN_STRIDE=TOKEN_STRIDE,
            UNIT=UNIT,
            BLOCK_SIZE=BLOCK_SIZE,
            HAS_CAP=HAS_CAP,
        )
        place = out + first_token.to(tl.int64) * out_stride + head * (GROUP * VALUE_DIM)
        if units == all_units:
            write_rows(total, weight, top, place, sinks, v_scale, head, GROUP, VALUE_DIM, out_stride, num_queries)
        else:
            part = (part_number(share, unit == 0) * HEADS + head) * rows
            tl.store(sums + (part + row)[:, None] * VALUE_DIM + value_dim, total, mask=is_value)
            tl.store(tops + part + row, top, mask=row < rows)
            tl.store(tops + num_shares * 2 * HEADS * rows + part + row, weight, mask=row < rows)
            if not APART:
                seq_begin = share * per_share + (count - left) - unit
                first_share = seq_begin // per_share
                last_share = (seq_begin + all_units - 1) // per_share
                arrival = arrivals + first_share * HEADS + head
                if is_last_to_arrive(arrival, last_share - first_share):
                    combine_parts(
                        sums,
                        tops,
                        first_share,
                        last_share,
                        num_shares,
                        place,
                        sinks,
                        v_scale,
                        head,
                        num_queries,
                        HEADS=HEADS,
                        GROUP=GROUP,
                        QUERIES=QUERIES,
                        PADDED_ROWS=PADDED_ROWS,
                        DIM=VALUE_DIM,
                        PADDED_DIM=PADDED_VALUE_DIM,
                        PARTS=PARTS,
                    )
        seq += 1
        unit = 0
        left -= units
        seq_len, table = _sequence(seq, left > 0, seq_lens, block_tables, table_rows, table_stride)
    if QUERIES > 1:  # tokens after the last sequence
        token = tl.load(query_start + num_seqs).to(tl.int64) + share
        while token < num_tokens:
            place = out + token * out_stride + head * (GROUP * VALUE_DIM)
            nothing = tl.zeros([ROWS, PADDED_VALUE_DIM], out.dtype.element_ty)
            tl.store(place + row[:, None] * VALUE_DIM + value_dim, nothing, mask=is_value & (row < GROUP)[:, None])
            token += num_shares


@triton.jit
def _queries_of(seq, query_start, QUERIES: tl.constexpr):
    """Return the first token of a sequence, and the number of its tokens in this step."""
    first_token = seq
    count = 1
    if QUERIES > 1:
        first_token = tl.load(query_start + seq)
        count = tl.load(query_start + seq + 1) - first_token
    return first_token, count


@triton.jit
def _sequence(seq, is_read, seq_lens, block_tables, table_rows, table_stride):
    """Return the length of a sequence and a pointer to its block ids; undefined unless `is_read`."""
    table_row = seq
    if table_rows is not None:
        table_row = tl.load(table_rows + seq, mask=is_read, other=0)
    return tl.load(seq_lens + seq, mask=is_read, other=0), block_tables + table_row.to(tl.int64) * table_stride


@triton.jit
def _keys_of(seq_len, window, unit, units, UNIT: tl.constexpr):
    """Return the range of keys (begin, end) of `units` units of a sequence, beginning with number `unit`."""
    begin = (first_visible(seq_len, window) // UNIT + unit) * UNIT
    return begin, tl.minimum(begin + units * UNIT, seq_len)


@triton.jit
def _places(key, is_read, table, kv_block_stride, BLOCK_SIZE: tl.constexpr, TOKEN_STRIDE: tl.constexpr):
    """Return the offset of each key from the first block's keys, in elements."""
    block = tl.load(table + key // BLOCK_SIZE, mask=is_read, other=0)
    return block.to(tl.int64) * kv_block_stride + (key % BLOCK_SIZE) * TOKEN_STRIDE


@triton.jit
def _prefetch_rows(place, DIM: tl.constexpr):
    """Prefetch the keys or values at `place` into L2."""
    line: tl.constexpr = LINE_BYTES * 8 // place.dtype.element_ty.primitive_bitwidth
    offset = tl.minimum(tl.arange(0, triton.next_power_of_2(triton.cdiv(DIM, line))) * line, DIM - 1)
    prefetch(place[:, None] + offset[None, :])


@triton.jit
def _attend_keys(
    query,
    kv_base,
    table,
    position,  # [ROWS] of each row's query
    window,
    begin,
    end,
    kv_block_stride,
    to_value,
    scale,
    soft_cap,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Attend to the keys begin:end that each query sees: weighted sums of values, sums of weights, top scores."""
    dim = tl.arange(0, PADDED_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    total = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    first_key = first_visible(position + 1, window)
    oldest_key = tl.min(first_key, 0)
    for start in tl.range(begin, end, UNIT):
        key = start + tl.arange(0, UNIT)
        visible = (key >= oldest_key) & (key < end)
        place = kv_base + _places(key, visible, table, kv_block_stride, BLOCK_SIZE, TOKEN_STRIDE)
        mask = visible[:, None]
        if DIM != PADDED_DIM:
            mask = mask & (dim < DIM)[None, :]
        value_mask = visible[:, None]
        if VALUE_DIM != PADDED_VALUE_DIM:
            value_mask = value_mask & (value_dim < VALUE_DIM)[None, :]
        k = tl.load(place[:, None] + dim[None, :], mask=mask, other=0.0)
        scores = tl.dot(query, k.to(query.dtype).T, input_precision="ieee") * scale
        if HAS_CAP:
            scores = capped(scores, soft_cap)
        seen = visible[None, :]
        if QUERIES > 1:
            seen = seen & (key[None, :] <= position[:, None]) & (key[None, :] >= first_key[:, None])
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        weight = weight * shrink + tl.sum(weights, 1)
        v = tl.load(place[:, None] + to_value + value_dim[None, :], mask=value_mask, other=0.0)
        total = tl.dot(weights.to(query.dtype), v.to(query.dtype), total * shrink[:, None], input_precision="ieee")
        top = new_top
    return total, weight, top

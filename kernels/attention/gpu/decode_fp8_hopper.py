"""Decode attention for Hopper over E4M3 caches: see `decode_tma`.

    scores [64, rows]   = keys query                 for each half of a unit; keys are converted to float16 in registers
    sums   [dims, rows] = values^T softmax(scores)   values, too: 8-bit tensor cores accumulate only about 14 bits

Float16 represents all E4M3 values, and weights more precisely than bfloat16, but its range is smaller. So each query is
divided by the power of two below its largest value, and scores are multiplied by it again, as by the keys' scale. The
weight of a top score is 2^14, not 1: thousands of keys with tiny weights may matter together, and must not underflow.

The product with values has dimensions as rows. Transposing loads bring them into registers, 16 bits at a time. So heads
of 128 dimensions are loaded as pairs of neighbours, and even and odd dimensions are two sums. Half of 64 dimensions
would not fill a product, so those heads are loaded byte by byte.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.hopper.flash import Partial
from baton.kernels.hopper.rings import BOX, IN_16_BITS, barrier, new_ring, view, view_as
from baton.kernels.pdl import let_next_start, wait_for_previous
from baton.kernels.split_kv import LOWEST

from ..rule import AttentionRule
from . import decode_tma
from .decode_output import DecodeOutput, DecodeParts, clear_padding, finish
from .decode_plan import SHARE_WORDS, DecodePlan
from .decode_tma import (
    KEYS,
    LOADER_REGISTERS,
    OF_KEYS,
    OF_VALUES,
    DecodeShape,
    Fitting,
    Fittings,
    KeyShare,
    KVCache,
    Queries,
    RightOperands,
    Scoring,
    Sequences,
    load_pages,
    load_query,
    part_in_share,
    seen_keys,
    visible_scores,
)

TOP_WEIGHT = gl.constexpr(14.0)  # log 2 of the weight of a top score; float16 ends below 2^16
HALVES = gl.constexpr(2)  # a unit is processed in halves, each with products of its own
UNIT = gl.constexpr(HALVES.value * KEYS.value)  # keys
FITTINGS = Fittings(
    few_rows={64: Fitting(2, 3, 128), 128: Fitting(2, 3, 128)},
    many_rows={64: Fitting(2, 3, 128), 128: Fitting(2, 2, 128)},
)
BOXES = {dim: gl.NVMMASharedLayout(dim, 8, 2) for dim in FITTINGS.few_rows}  # a swizzle spans a key


def plan_tma_decode(batch: AttentionBatch, kv: Tensor, num_heads: int) -> DecodePlan | None:
    """Return the plan for the sequences of `decode_options.plan_decode`.

    None for a cache that this kernel does not read.
    """
    return decode_tma.plan_tma_decode(batch, kv, num_heads, (torch.float8_e4m3fn,), UNIT.value, FITTINGS)


def serves(q: Tensor, kv: Tensor) -> bool:
    """Return whether this kernel supports these queries."""
    return q.dtype in IN_16_BITS and kv.dtype == torch.float8_e4m3fn


def tma_decode(
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: DecodePlan,
    rule: AttentionRule,
    *,
    out: Tensor,
) -> None:
    """Decode as `decode.paged_decode` does. Call it only if `plan_tma_decode` returned a plan and `serves` is true."""
    dim, scales = q.shape[2], {"k_scale": rule.k_scale, "v_scale": rule.v_scale}
    decode_tma.launch(attend_share, q, kv, layer, batch, plan, rule, FITTINGS, BOXES[dim], out=out, **scales)


@gluon.jit
def _consume(share, sequences, queries, output, scoring, operands, keys, values, shape):
    let_next_start()
    scale = scoring.scale
    query_memory, weight_memory = operands.query, operands.weights
    PAIRS: gl.constexpr = shape.DIM == 128
    HEIGHT: gl.constexpr = shape.DIM // 2 if PAIRS else shape.DIM  # of the products of values
    seq, unit, count = share.first_seq(), share.first_unit(), share.num_units()
    left = count
    n = 0
    if scoring.k_scale is not None:
        scale *= gl.load(scoring.k_scale)
    value_scale = 1.0
    if scoring.v_scale is not None:
        value_scale = gl.load(scoring.v_scale)
    wait_for_previous()
    while left > 0:
        part = part_in_share(seq, unit, left, sequences, shape)
        seq_len = part.seq_len
        first_token, num_queries = sequences.queries(seq, shape)
        seen = seen_keys(sequences, seq_len, num_queries, shape)
        divisor = _put_query(queries, first_token, num_queries, share.head, query_memory, shape)
        factor = gl.expand_dims(divisor * scale, 0)  # [1, ROWS]
        top = gl.full([shape.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, shape.MMA))
        weights = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)  # one sum per key position in a half
        sums = gl.zeros([HEIGHT, shape.ROWS], gl.float32, shape.MMA)
        odd = gl.zeros([HEIGHT, shape.ROWS], gl.float32, shape.MMA)  # with PAIRS: sums of dimensions 1, 3, ...
        for index in range(part.tiles):
            begin = (part.first + index) * UNIT
            keys.await_full(n)
            products = _multiply_keys(keys.slab(n, 0), query_memory, shape)
            keys.release(n)
            scores = ()
            highest = gl.full([KEYS, shape.ROWS], LOWEST, gl.float32, shape.MMA)
            for half in gl.static_range(HALVES):
                score = products[half] * factor
                score = visible_scores(score, scoring.soft_cap, seen, begin + half * KEYS, shape)
                scores = scores + (score,)
                highest = gl.maximum(highest, score)
            new_top = gl.maximum(top, gl.max(highest, 0) - TOP_WEIGHT)
            shrink = gl.expand_dims(gl.exp2(top - new_top), 0)
            weights = weights * shrink
            for half in gl.static_range(HALVES):
                probabilities = gl.exp2(scores[half] - gl.expand_dims(new_top, 0))
                weight_memory.index(half).store(probabilities.to(gl.float16).trans())
                weights = weights + probabilities
            hopper.fence_async_shared()
            barrier()  # all warps have stored their weights
            sums = sums * shrink
            odd = odd * shrink
            values.await_full(n)
            for half in gl.static_range(HALVES):
                num_keys = seq_len - begin - half * KEYS
                weight = weight_memory.index(half).permute((1, 0))
                if PAIRS:
                    even_value, odd_value = _pairs_of_values(values.slab(n, 0), half, num_keys, shape)
                    sums = hopper.warpgroup_mma(even_value, weight, sums, is_async=True)
                    odd = hopper.warpgroup_mma(odd_value, weight, odd, is_async=True)
                else:
                    value = _values(values.slab(n, 0), half, num_keys, shape)
                    sums = hopper.warpgroup_mma(value, weight, sums, is_async=True)
            sums, odd = hopper.warpgroup_mma_wait(0, deps=[sums, odd])
            barrier()  # all warps have read the weights, and the values
            values.release(n)
            top = new_top
            n += 1
        if PAIRS:
            joined = gl.reshape(gl.permute(gl.join(sums, odd), (0, 2, 1)), [shape.DIM, shape.ROWS])
            found = Partial(gl.convert_layout(joined, shape.MMA), gl.sum(weights, 0), top)
        else:
            found = Partial(sums, gl.sum(weights, 0), top)
        finish(found, first_token, num_queries, unit, part, count - left, share, output, value_scale, shape)
        seq += 1
        unit = 0
        left -= part.units
    clear_padding(sequences, share, output, shape)


@gluon.jit
def _put_query(queries, first_token, num_queries, head, query_memory, shape):
    """Store the query heads that read a KV head as a right operand, and return the divisor of each [ROWS]."""
    query = load_query(queries, first_token, num_queries, head, shape).to(gl.float32)
    largest = gl.max(gl.abs(query), 1)
    unit = (largest.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)  # no mantissa: a power of two
    unit = gl.where(unit > 0, unit, 1.0)
    query_memory.store((query / gl.expand_dims(unit, 1)).to(gl.float16))
    hopper.fence_async_shared()
    barrier()
    return gl.convert_layout(unit, gl.SliceLayout(0, shape.MMA))


@gluon.jit
def _multiply_keys(unit, query_memory, shape):
    """Multiply each half of a unit of keys [UNIT, DIM] by the query: [KEYS, ROWS].

    On return, all warps have read the keys.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, shape.MMA, 2)
    BOX_8: gl.constexpr = unit.layout
    query = query_memory.permute((1, 0))
    products = ()
    for half in gl.static_range(HALVES):
        key = view(unit, [HALVES, KEYS, shape.DIM], BOX_8).index(half).load(LEFT).to(gl.float16)
        product = gl.zeros([KEYS, shape.ROWS], gl.float32, shape.MMA)
        products = products + (hopper.warpgroup_mma(key, query, product, use_acc=False, is_async=True),)
    products = hopper.warpgroup_mma_wait(0, deps=products)
    barrier()
    return products


@gluon.jit
def _pairs_of_values(unit, half: gl.constexpr, num_keys, shape):
    """Load half a unit of values as left operands [DIM / 2, KEYS] of products: dimensions 0, 2, ... and 1, 3, ..."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, shape.MMA, 2)
    pair = view_as(gl.uint16, unit, [HALVES, KEYS, shape.DIM // 2], BOX).index(half).permute((1, 0)).load(LEFT)
    pair = _without_tail(pair, num_keys)
    even = (pair & 0xFF).to(gl.uint8).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    odd = (pair >> 8).to(gl.uint8).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    return even, odd


@gluon.jit
def _values(unit, half: gl.constexpr, num_keys, shape):
    """Load half a unit of values as the left operand [DIM, KEYS] of a product."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, shape.MMA, 2)
    BOX_8: gl.constexpr = unit.layout
    value = view(unit, [HALVES, KEYS, shape.DIM], BOX_8).index(half).permute((1, 0)).load(LEFT).to(gl.float16)
    return _without_tail(value, num_keys)


@gluon.jit
def _without_tail(value, num_keys):
    """Zero the values after the sequence's end: they may be infinite or NaN, and zero times infinity is not zero."""
    if num_keys < KEYS:
        column = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, value.type.layout)), 0)
        value = gl.where(column < num_keys, value, gl.zeros_like(value))
    return value


@gluon.jit(do_not_specialize=["layer", "window", "num_shares", "num_seqs", "num_tokens", "table_stride"])
def attend_share(
    q,
    pages,
    out,
    sinks,
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
    window,
    soft_cap,
    num_layers,
    num_shares,
    num_seqs,
    num_tokens,
    q_token_stride,
    table_stride,
    k_scale,
    v_scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    APART: gl.constexpr,
    HAS_CAP: gl.constexpr,
):
    """Attend to one share of the keys, for one KV head and the GROUP heads of each query that read it.

    `pages` is a TMA descriptor with boxes [page, DIM] of kv, viewed as rows of one head's dimensions.
    """
    operands = RightOperands(
        gl.allocate_shared_memory(gl.float16, [ROWS, DIM], BOX),
        gl.allocate_shared_memory(gl.float16, [HALVES, ROWS, KEYS], BOX),
    )
    BOX_8: gl.constexpr = pages.layout
    keys = new_ring(pages.dtype, STAGES, UNIT, DIM, 1, BOX_8)
    values = new_ring(pages.dtype, STAGES, UNIT, DIM, 1, BOX_8)
    hopper.fence_async_shared()
    shape = DecodeShape(HEADS, GROUP, QUERIES, ROWS, DIM, PAGE, UNIT, APART, HAS_CAP)
    share = KeyShare(words + gl.program_id(0) // HEADS * SHARE_WORDS, gl.program_id(0) % HEADS)
    sequences = Sequences(seq_lens, query_start, num_seqs, block_tables, table_rows, table_stride, window)
    cache = KVCache(pages, layer, num_layers)
    output = DecodeOutput(out, sinks, DecodeParts(sums, tops, arrivals, num_shares), num_tokens)
    queries, scoring = Queries(q, q_token_stride), Scoring(scale, soft_cap, k_scale, v_scale)
    gl.warp_specialize(
        [
            (_consume, (share, sequences, queries, output, scoring, operands, keys, values, shape)),
            (load_pages, (share, sequences, cache, keys, OF_KEYS, shape)),
            (load_pages, (share, sequences, cache, values, OF_VALUES, shape)),
        ],
        [1, 1],
        [LOADER_REGISTERS, LOADER_REGISTERS],
    )

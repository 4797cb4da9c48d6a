"""Decode attention for Hopper over 16-bit caches: see `decode_tma`.

    scores [unit, rows] = keys query                         keys and dimensions are the rows of the products: they fill
    sums   [dims, rows] = values^T softmax(scores)           a warp group's tile, and stay in shared memory

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.hopper.flash import Partial
from baton.kernels.hopper.rings import BOX, IN_16_BITS, barrier, clear_tail, new_ring
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

UNIT = KEYS  # keys
FITTINGS = Fittings(
    few_rows={64: Fitting(2, 6, 128), 128: Fitting(2, 3, 128), 256: Fitting(1, 3, 255)},
    many_rows={64: Fitting(2, 6, 128), 128: Fitting(2, 3, 128)},
)


def plan_tma_decode(batch: AttentionBatch, kv: Tensor, num_heads: int) -> DecodePlan | None:
    """Return the plan for the sequences of `decode_options.plan_decode`.

    None for a cache that this kernel does not read.
    """
    return decode_tma.plan_tma_decode(batch, kv, num_heads, IN_16_BITS, UNIT.value, FITTINGS)


def serves(q: Tensor, kv: Tensor, rule: AttentionRule) -> bool:
    """Return whether this kernel supports these queries and this rule: queries of the cache's dtype, no scales."""
    return q.dtype == kv.dtype and not rule.is_scaled


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
    decode_tma.launch(attend_share, q, kv, layer, batch, plan, rule, FITTINGS, BOX.value, out=out)


@gluon.jit
def _consume(share, sequences, queries, output, scoring, operands, keys, values, shape):
    let_next_start()
    query_memory, weight_memory = operands.query, operands.weights
    seq, unit, count = share.first_seq(), share.first_unit(), share.num_units()
    left = count
    n = 0
    wait_for_previous()
    while left > 0:
        part = part_in_share(seq, unit, left, sequences, shape)
        seq_len = part.seq_len
        first_token, num_queries = sequences.queries(seq, shape)
        seen = seen_keys(sequences, seq_len, num_queries, shape)
        query_memory.store(
            load_query(queries, first_token, num_queries, share.head, shape)
        )  # all warps have finished the previous one
        hopper.fence_async_shared()
        barrier()
        top = gl.full([shape.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, shape.MMA))
        weights = gl.zeros([UNIT, shape.ROWS], gl.float32, shape.MMA)  # one sum per key position in a unit
        sums = gl.zeros([shape.DIM, shape.ROWS], gl.float32, shape.MMA)
        for index in range(part.tiles):
            begin = (part.first + index) * UNIT
            keys.await_full(n)
            scores = gl.zeros([UNIT, shape.ROWS], gl.float32, shape.MMA)
            query = query_memory.permute((1, 0))
            scores = hopper.warpgroup_mma(keys.tile(n), query, scores, use_acc=False, is_async=True)
            scores = hopper.warpgroup_mma_wait(0, deps=[scores]) * scoring.scale
            keys.release(n)
            scores = visible_scores(scores, scoring.soft_cap, seen, begin, shape)
            new_top = gl.maximum(top, gl.max(scores, 0))
            probabilities = gl.exp2(scores - gl.expand_dims(new_top, 0))
            shrink = gl.expand_dims(gl.exp2(top - new_top), 0)
            weight_memory.store(probabilities.to(weight_memory.dtype).trans())
            hopper.fence_async_shared()
            barrier()
            weights = weights * shrink + probabilities
            values.await_full(n)
            if begin + UNIT > seq_len:
                clear_tail(values, n, seq_len, shape.PAGE)
            value = values.tile(n).permute((1, 0))
            sums = hopper.warpgroup_mma(value, weight_memory.permute((1, 0)), sums * shrink, is_async=True)
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            values.release(n)
            top = new_top
            n += 1
        found = Partial(sums, gl.sum(weights, 0), top)
        finish(found, first_token, num_queries, unit, part, count - left, share, output, None, shape)
        seq += 1
        unit = 0
        left -= part.units
    clear_padding(sequences, share, output, shape)


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

    `pages` is a TMA descriptor with boxes [page, slab] of kv, viewed as rows of one head's dimensions.
    """
    operands = RightOperands(
        gl.allocate_shared_memory(pages.dtype, [ROWS, DIM], BOX),
        gl.allocate_shared_memory(pages.dtype, [ROWS, UNIT], BOX),
    )
    keys = new_ring(pages.dtype, STAGES, UNIT, DIM, 1)
    values = new_ring(pages.dtype, STAGES, UNIT, DIM, 1)
    hopper.fence_async_shared()
    shape = DecodeShape(HEADS, GROUP, QUERIES, ROWS, DIM, PAGE, UNIT, APART, HAS_CAP)
    share = KeyShare(words + gl.program_id(0) // HEADS * SHARE_WORDS, gl.program_id(0) % HEADS)
    sequences = Sequences(seq_lens, query_start, num_seqs, block_tables, table_rows, table_stride, window)
    cache = KVCache(pages, layer, num_layers)
    output = DecodeOutput(out, sinks, DecodeParts(sums, tops, arrivals, num_shares), num_tokens)
    queries, scoring = Queries(q, q_token_stride), Scoring(scale, soft_cap, None, None)
    gl.warp_specialize(
        [
            (_consume, (share, sequences, queries, output, scoring, operands, keys, values, shape)),
            (load_pages, (share, sequences, cache, keys, OF_KEYS, shape)),
            (load_pages, (share, sequences, cache, values, OF_VALUES, shape)),
        ],
        [1, 1],
        [LOADER_REGISTERS, LOADER_REGISTERS],
    )

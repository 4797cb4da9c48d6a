"""Decode attention for Hopper, warp-specialized: the plan, the launch and the loader warps of its two kernels.

    loader warps    pages ──TMA──> rings of keys and of values     one warp per ring, unit by unit, across sequences, as
                                                                   far ahead as the ring has stages
    four warps      products with the loaded units                 `decode_hopper` (16-bit caches) and
                                                                   `decode_fp8_hopper` (E4M3 caches)
                    the result of a sequence, or a part of it      `decode_output`

Work is partitioned and parts are combined as in `decode`, with the same plan. With many sequences, memory and TMA take
nearly all of the time. A large batch also runs at the device's power limit, so power saved in other units makes
everything faster.

Only a sequence's newest keys and values, as many as it has queries, are written in this step. So pages are loaded while
the previous kernels still run: a loader warp waits for them only when it reaches a unit with such a key.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from baton.kernels.attention_batch import AttentionBatch
from baton.kernels.hopper.rings import Value, async_load, cache_fits_boxes, record, view
from baton.kernels.pdl import launch_options, wait_for_previous
from baton.kernels.split_kv import LOG2_E

from ..rule import AttentionRule
from .decode_combine import add_parts
from .decode_options import DEFAULT, MOST_ROWS, decode_plan, most_queries
from .decode_output import capped
from .decode_plan import FIRST_SEQ, FIRST_UNIT, NUM_UNITS, UNITS_PER_SHARE, DecodePlan, first_visible, units_of

KEYS = gl.constexpr(64)  # the rows of one product of a warp group
FEW_ROWS = 16  # rows of products for which two programs of wide heads have enough registers
FEW_SEQS = 4  # with at most this many sequences, a second kernel combines parts
LOADER_REGISTERS = gl.constexpr(40)
OF_KEYS, OF_VALUES = gl.constexpr(0), gl.constexpr(1)  # the halves of a block


@dataclasses.dataclass(frozen=True)
class Fitting:
    """The number of programs and the depth of the rings that fit a multiprocessor."""

    programs: int  # concurrent programs of a multiprocessor
    stages: int  # units in a ring
    registers: int  # registers per thread at launch


@dataclasses.dataclass(frozen=True)
class Fittings:
    """The fitting of each head size."""

    few_rows: Mapping[int, Fitting]  # up to FEW_ROWS rows: the query heads that read one KV head, for all queries
    many_rows: Mapping[int, Fitting]

    def of(self, dim: int, rows: int) -> Fitting | None:
        """Return the fitting for this many rows; None if nothing fits."""
        if rows > MOST_ROWS:
            return None
        return (self.few_rows if rows <= FEW_ROWS else self.many_rows).get(dim)


def plan_tma_decode(
    batch: AttentionBatch,
    kv: Tensor,
    num_heads: int,
    dtypes: tuple[torch.dtype, ...],
    unit_tokens: int,
    fittings: Fittings,
) -> DecodePlan | None:
    """Return the plan for the sequences of `decode_options.plan_decode`.

    None if the cache's dtype is not in `dtypes`, TMA cannot read its pages, or no fitting exists for its heads.

    The options also suit `decode`, which serves queries that the TMA kernel does not support. Reads shapes only.
    """
    num_kv_heads, dim = kv.shape[1], kv.shape[5]
    fitting = fittings.of(dim, num_heads // num_kv_heads * most_queries(batch))
    if fitting is None or not cache_fits_boxes(kv, dtypes):
        return None
    options = {**DEFAULT, "unit_tokens": unit_tokens, "programs": fitting.programs, "min_units": 1, "early_units": 0}
    options["apart"] = int(batch.num_decodes <= FEW_SEQS)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "value_dim": dim}
    return dataclasses.replace(decode_plan(batch, options, **heads), uses_tma=True)


def launch(
    attend_share: Any,
    q: Tensor,
    kv: Tensor,
    layer: int,
    batch: AttentionBatch,
    plan: DecodePlan,
    rule: AttentionRule,
    fittings: Fittings,
    box: gl.NVMMASharedLayout,
    *,
    out: Tensor,
    **scales: Tensor | None,
) -> None:
    """Launch `attend_share` instead of `decode.paged_decode`. `box` is the layout of a page in shared memory."""
    num_heads, dim = q.shape[1:]
    _, num_kv_heads, num_layers, _, block_size, _ = kv.shape
    shares, group = plan.shares(rule.limit), num_heads // num_kv_heads
    fitting = fittings.of(dim, plan.queries * group)
    assert fitting is not None, "the plan was made for another kernel"
    columns = box.swizzle_byte_width // kv.itemsize
    attend_share[(shares.num_shares * num_kv_heads,)](
        q,
        TensorDescriptor.from_tensor(kv.view(-1, dim), [block_size, columns], box),
        out,
        rule.sinks,
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
        *(num_layers, shares.num_shares, plan.num_seqs, batch.num_tokens),
        *(q.stride(0), batch.block_tables.stride(0)),
        **scales,
        HEADS=num_kv_heads,
        GROUP=group,
        QUERIES=plan.queries,
        ROWS=max(8, triton.next_power_of_2(plan.queries * group)),
        DIM=dim,
        PAGE=block_size,
        STAGES=fitting.stages,
        APART=plan.apart,
        HAS_CAP=rule.has_cap,
        num_warps=4,
        maxnreg=fitting.registers,
        **launch_options(),
    )
    if plan.apart:
        add_parts(out[: batch.num_decodes], plan, shares, rule)


@aggregate
class DecodeShape:
    """The compile-time sizes of a decode kernel."""

    HEADS: gl.constexpr  # KV heads
    GROUP: gl.constexpr  # query heads that read one KV head
    QUERIES: gl.constexpr  # most queries of a sequence
    REAL_ROWS: gl.constexpr  # QUERIES * GROUP
    ROWS: gl.constexpr  # REAL_ROWS with padding
    DIM: gl.constexpr
    PAGE: gl.constexpr
    UNIT: gl.constexpr  # keys
    APART: gl.constexpr
    HAS_CAP: gl.constexpr
    MMA: gl.constexpr  # register layout of the products' results

    @gluon.constexpr_function
    def __init__(self, HEADS, GROUP, QUERIES, ROWS, DIM, PAGE, UNIT, APART, HAS_CAP):
        self.HEADS = gl.constexpr(HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.QUERIES = gl.constexpr(QUERIES)
        self.REAL_ROWS = gl.constexpr(QUERIES * GROUP)
        self.ROWS = gl.constexpr(ROWS)
        self.DIM = gl.constexpr(DIM)
        self.PAGE = gl.constexpr(PAGE)
        self.UNIT = gl.constexpr(UNIT)
        self.APART = gl.constexpr(APART)
        self.HAS_CAP = gl.constexpr(HAS_CAP)
        self.MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))


@record
class KeyShare:
    """One program's share of keys, written by `decode_plan.write_shares`, and its KV head."""

    words: gl.tensor  # pointer to its int32 words
    head: gl.tensor

    @gluon.jit
    def first_seq(self):
        return gl.load(self.words + FIRST_SEQ)

    @gluon.jit
    def first_unit(self):
        """Return the index of the share's first unit within its first sequence."""
        return gl.load(self.words + FIRST_UNIT)

    @gluon.jit
    def num_units(self):
        return gl.load(self.words + NUM_UNITS)

    @gluon.jit
    def units_per_share(self):
        """Return the number of units of every share but the last."""
        return gl.load(self.words + UNITS_PER_SHARE)


@record
class Sequences:
    """The sequences of the step: pointers to their lengths, first tokens and blocks, and the window of the layer."""

    seq_lens: gl.tensor
    query_start: gl.tensor  # not read if each sequence has one query
    num_seqs: gl.tensor
    block_tables: gl.tensor
    table_rows: Value  # pointer, or None: sequence i has row i
    table_stride: gl.tensor
    window: gl.tensor  # keys that a sequence's queries see together: the window of one, plus the later queries

    @gluon.jit
    def table(self, seq):
        """Return a pointer to the block ids of a sequence."""
        row = seq
        if self.table_rows is not None:
            row = gl.load(self.table_rows + seq)
        return self.block_tables + row.to(gl.int64) * self.table_stride

    @gluon.jit
    def queries(self, seq, shape):
        """Return the first token of a sequence, and the number of its tokens in this step."""
        first_token = seq
        count = 1
        if shape.QUERIES > 1:
            first_token = gl.load(self.query_start + seq)
            count = gl.load(self.query_start + seq + 1) - first_token
        return first_token, count


@record
class KVCache:
    """One layer of the cache."""

    pages: Value  # TMA descriptor with boxes [page, columns] of kv, viewed as rows of one head's dimensions
    layer: gl.tensor
    num_layers: Value


@record
class Queries:
    """The queries of the step."""

    q: gl.tensor
    token_stride: Value


@record
class Scoring:
    """The factors of scores and values."""

    scale: gl.tensor
    soft_cap: gl.tensor
    k_scale: Value  # pointer, or None
    v_scale: Value  # pointer, or None


@record
class SeenKeys:
    """The range of a sequence's keys that each of its queries sees."""

    first: gl.tensor  # [ROWS]
    end: gl.tensor  # [ROWS]
    by_all: gl.tensor  # the first key that all queries see
    end_of_all: gl.tensor


@record
class RightOperands:
    """Shared memory for the right operands of products."""

    query: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor


@record
class SeqPart:
    """The part of a sequence that lies in a share."""

    seq_len: gl.tensor
    all_units: gl.tensor  # units of the sequence
    units: gl.tensor  # units of the sequence in this share
    tiles: gl.tensor  # units in this share that contain keys
    first: gl.tensor  # index of the first of them, counted from the sequence's first key


@gluon.jit
def part_in_share(seq, unit, left, sequences, shape):
    """Return the part of a share's `left` units that lies in sequence `seq`, from its unit `unit` on."""
    seq_len = gl.load(sequences.seq_lens + seq)
    all_units = units_of(seq_len, sequences.window, shape.UNIT)
    units = gl.minimum(all_units - unit, left)
    tiles = gl.where(seq_len > 0, units, 0)
    return SeqPart(seq_len, all_units, units, tiles, first_visible(seq_len, sequences.window) // shape.UNIT + unit)


@gluon.jit
def load_pages(share, sequences, cache, ring, HALF: gl.constexpr, shape):
    """Load the keys or the values of a share's units by TMA into a ring."""
    PAGES: gl.constexpr = shape.UNIT // shape.PAGE
    COLUMNS: gl.constexpr = ring.slabs.shape[2]
    BOX: gl.constexpr = cache.pages.layout
    row = ((share.head * cache.num_layers + cache.layer) * 2 + HALF) * shape.PAGE
    block_rows = shape.HEADS * cache.num_layers * (2 * shape.PAGE)
    seq, unit, left = share.first_seq(), share.first_unit(), share.num_units()
    n = 0
    while left > 0:
        part = part_in_share(seq, unit, left, sequences, shape)
        table = sequences.table(seq)
        num_pages = gl.cdiv(part.seq_len, shape.PAGE)
        _, num_queries = sequences.queries(seq, shape)
        num_hidden = oldest_key(sequences, part.seq_len, num_queries, shape) // shape.PAGE
        for index in range(part.tiles):
            page = (part.first + index) * PAGES
            # Pages after the sequence's last, and those behind the window, which may be other requests' by now, become
            # rows after the last row, which TMA loads as zeros.
            places = ()
            for i in gl.static_range(PAGES):
                exists = (page + i >= num_hidden) & (page + i < num_pages)
                block = gl.load(table + page + i, mask=exists, other=0)
                places = places + (gl.where(exists, block * block_rows + row, cache.pages.shape[0]),)
            if (part.first + index + 1) * shape.UNIT > part.seq_len - shape.QUERIES:
                wait_for_previous()  # the newest keys and values are written in this step
            ring.await_free(n)
            ring.expect(n)
            for i in gl.static_range(PAGES):
                for slab in gl.static_range(shape.DIM // COLUMNS):
                    box = view(ring.slab(n, slab), [PAGES, shape.PAGE, COLUMNS], BOX).index(i)
                    async_load(cache.pages, [places[i], slab * COLUMNS], ring.barrier(n), box)
            n += 1
        seq += 1
        unit = 0
        left -= part.units


@gluon.jit
def oldest_key(sequences, seq_len, num_queries, shape):
    """Return the first key that a sequence's first query sees."""
    return first_visible(seq_len - num_queries + 1, sequences.window - (shape.QUERIES - 1))


@gluon.jit
def seen_keys(sequences, seq_len, num_queries, shape):
    """Return the keys that each query of a sequence sees."""
    window = sequences.window - (shape.QUERIES - 1)
    row = gl.arange(0, shape.ROWS, gl.SliceLayout(0, shape.MMA))
    end = seq_len + gl.zeros_like(row)
    if shape.QUERIES > 1:
        end = gl.minimum(seq_len - num_queries + row // shape.GROUP + 1, seq_len)
    return SeenKeys(
        first_visible(end, window), end, first_visible(seq_len, window), gl.minimum(seq_len - num_queries + 1, seq_len)
    )


@gluon.jit
def load_query(queries, first_token, num_queries, head, shape):
    """Load the heads [ROWS, DIM] of each query that read a KV head; zeros for padding."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // shape.DIM, shape.DIM // 8], [4, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, shape.ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    dim = gl.expand_dims(gl.arange(0, shape.DIM, gl.SliceLayout(0, LAYOUT)), 0)
    place = queries.q + first_token.to(gl.int64) * queries.token_stride
    if shape.QUERIES > 1:
        place = place + row // shape.GROUP * queries.token_stride
        row_head = row % shape.GROUP
    else:
        row_head = row
    place = place + (head * shape.GROUP + row_head) * shape.DIM + dim
    return gl.load(place, mask=row < num_queries * shape.GROUP, other=0.0)


@gluon.jit
def visible_scores(scores, soft_cap, seen, begin, shape):
    """Return capped scores [KEYS, ROWS] of the keys from `begin` on, in units of log 2; -inf for invisible keys."""
    if shape.HAS_CAP:
        scores = capped(scores, soft_cap)
    scores = scores * LOG2_E
    if (begin + KEYS > seen.end_of_all) | (begin < seen.by_all):
        key = gl.expand_dims(begin + gl.arange(0, KEYS, gl.SliceLayout(1, shape.MMA)), 1)
        is_seen = (key < gl.expand_dims(seen.end, 0)) & (key >= gl.expand_dims(seen.first, 0))
        scores = gl.where(is_seen, scores, float("-inf"))
    return scores

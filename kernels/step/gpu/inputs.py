"""Kernels that apply changes to row tables, and compute a step's inputs from them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.state_batch import StateBatch

from ..buffers import PIECE, StepBatch, StepBuffers, StepTables

BLOCK = 128  # tokens or sequences of one program
WRITERS = 256  # programs that apply pieces; a step has more pieces only when hundreds of requests start at once


def apply_writes(memory: Tensor, pieces: Tensor, values: Tensor, num_pieces: Tensor) -> None:
    """Apply changes to tables in one kernel."""
    writers = min(WRITERS, len(pieces))
    _apply_writes[(writers,)](memory, pieces, values, num_pieces, writers, BLOCK=PIECE, num_warps=4)


@triton.jit(do_not_specialize=["writers"])
def _apply_writes(memory, pieces, values, num_pieces, writers, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    for index in range(tl.program_id(0), tl.load(num_pieces), writers):
        piece = pieces + index * 3
        to, source, count = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
        mask = offsets < count
        tl.store(memory + to + offsets, tl.load(values + source + offsets, mask=mask), mask=mask)


@triton.jit
def owners(token, query_start, num_seqs, BLOCK: tl.constexpr):
    """Return the last sequence that begins at or before each token; of several that begin there, the last."""
    first = tl.zeros([BLOCK], tl.int32)
    last = tl.zeros([BLOCK], tl.int32) + num_seqs - 1
    while tl.max(last - first) > 0:
        middle = (first + last + 1) // 2
        before = tl.load(query_start + middle) <= token
        first = tl.where(before, middle, first)
        last = tl.where(before, last, middle - 1)
    return first


def decode_inputs(tables: StepTables, batch: StepBatch, inputs: StepBuffers) -> None:
    num_seqs = len(inputs.seq_lens)
    _decode_inputs[(triton.cdiv(num_seqs, BLOCK),)](
        tables.tokens,
        tables.blocks,
        tables.computed,
        batch.rows,
        *_fields(inputs),
        num_seqs,
        tables.tokens.stride(0),
        tables.blocks.stride(1),
        tables.blocks.stride(0),
        inputs.slots.stride(0),
        tables.block_size,
        GROUPS=len(tables.blocks),
        BLOCK=BLOCK,
        num_warps=4,
    )


def chunk_inputs(tables: StepTables, batch: StepBatch, inputs: StepBuffers) -> None:
    num_seqs, num_tokens = len(inputs.seq_lens), len(inputs.token_ids)
    token_programs = triton.cdiv(num_tokens, BLOCK)
    _chunk_inputs[(token_programs + triton.cdiv(num_seqs, BLOCK),)](
        tables.tokens,
        tables.blocks,
        tables.computed,
        batch.rows,
        batch.query_start,
        *_fields(inputs),
        num_tokens,
        num_seqs,
        token_programs,
        tables.tokens.stride(0),
        tables.blocks.stride(1),
        tables.blocks.stride(0),
        inputs.slots.stride(0),
        tables.block_size,
        GROUPS=len(tables.blocks),
        BLOCK=BLOCK,
        num_warps=4,
    )


def decode_states(
    table: Tensor, computed: Tensor, batch: StepBatch, entry_tokens: int, sources: Tensor, targets: Tensor
) -> None:
    num_seqs = len(batch.rows)
    _decode_states[(triton.cdiv(num_seqs, BLOCK),)](
        table,
        computed,
        batch.rows,
        sources,
        targets,
        num_seqs,
        table.stride(0),
        entry_tokens,
        BLOCK=BLOCK,
        num_warps=4,
    )


def replay_states(
    table: Tensor, computed: Tensor, applied: Tensor, rows: Tensor, states: StateBatch, entry_tokens: int
) -> None:
    replay, num_seqs = states.replay, len(rows)
    assert replay is not None, "there are drafts"
    _replay_states[(triton.cdiv(num_seqs, BLOCK),)](
        table,
        computed,
        applied,
        rows,
        states.query_start,
        states.num_decodes,
        states.sources,
        states.targets,
        replay.rows,
        replay.starts,
        replay.counts,
        num_seqs,
        table.stride(0),
        entry_tokens,
        BLOCK=BLOCK,
        num_warps=4,
    )


def _fields(inputs: StepBuffers) -> tuple[Tensor, ...]:
    return (
        inputs.token_ids,
        inputs.positions,
        inputs.slots,
        inputs.seq_lens,
        inputs.table_rows,
        inputs.last_tokens,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _decode_inputs(
    tokens,
    blocks,
    computed,
    rows,
    token_ids,
    positions,
    slots,
    seq_lens,
    table_rows,
    last_tokens,
    num_seqs,
    tokens_stride,
    blocks_stride,
    group_stride,
    slots_stride,
    block_size: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seqs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = seqs < num_seqs
    row = tl.load(rows + seqs, mask=mask, other=-1)
    real = mask & (row >= 0)
    start = tl.load(computed + tl.maximum(row, 0), mask=real, other=0)
    _fill_tokens(
        tokens,
        blocks,
        token_ids,
        positions,
        slots,
        seqs,
        row,
        start,
        real,
        mask,
        tokens_stride,
        blocks_stride,
        group_stride,
        slots_stride,
        block_size,
        GROUPS,
    )
    tl.store(seq_lens + seqs, tl.where(real, start + 1, 0), mask=mask)
    tl.store(table_rows + seqs, tl.maximum(row, 0), mask=mask)
    tl.store(last_tokens + seqs, seqs.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["num_seqs"])
def _decode_states(
    table,
    computed,
    rows,
    sources,
    targets,
    num_seqs,
    table_stride,
    entry_tokens: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seqs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = seqs < num_seqs
    row = tl.load(rows + seqs, mask=mask, other=-1)
    real = row >= 0
    start = tl.load(computed + tl.maximum(row, 0), mask=real, other=0)
    entries = table + tl.maximum(row, 0).to(tl.int64) * table_stride
    source = tl.load(entries + (start - 1) // entry_tokens, mask=real & (start > 0), other=-1)
    tl.store(sources + seqs, source, mask=mask)
    target = tl.load(entries + start // entry_tokens, mask=real, other=-1)
    tl.store(targets + seqs, target, mask=mask)


@triton.jit(do_not_specialize=["num_seqs"])
def _replay_states(
    table,
    computed,
    applied,
    rows,
    query_start,
    num_decodes,
    sources,
    targets,
    replay_rows,
    replay_starts,
    replay_counts,
    num_seqs,
    table_stride,
    entry_tokens: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seqs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = seqs < num_seqs
    row = tl.load(rows + seqs, mask=mask, other=-1)
    real, own = row >= 0, tl.maximum(row, 0)
    is_decode = mask & (seqs < tl.load(num_decodes))
    start = tl.load(computed + own, mask=real, other=0)
    before = tl.load(applied + own, mask=real, other=0)
    length = tl.load(query_start + seqs + 1, mask=mask, other=0) - tl.load(query_start + seqs, mask=mask, other=0)
    entries = table + own.to(tl.int64) * table_stride
    source = tl.load(entries + (before - 1) // entry_tokens, mask=real & (before > 0), other=-1)
    tl.store(sources + seqs, source, mask=is_decode)
    target = tl.load(entries + start // entry_tokens, mask=real, other=-1)
    tl.store(targets + seqs, target, mask=is_decode)
    tl.store(replay_rows + seqs, own, mask=mask)
    tl.store(replay_starts + seqs, start, mask=mask)
    tl.store(replay_counts + seqs, tl.where(is_decode, start - before, 0), mask=mask)
    tl.store(applied + own, start + tl.where(is_decode, 1, length), mask=real)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "token_programs"])
def _chunk_inputs(
    tokens,
    blocks,
    computed,
    rows,
    query_start,
    token_ids,
    positions,
    slots,
    seq_lens,
    table_rows,
    last_tokens,
    num_tokens,
    num_seqs,
    token_programs,
    tokens_stride,
    blocks_stride,
    group_stride,
    slots_stride,
    block_size: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill tokens in the first programs, sequences in the others."""
    program = tl.program_id(0)
    if program < token_programs:
        token = program * BLOCK + tl.arange(0, BLOCK)
        mask = token < num_tokens
        real = token < tl.load(query_start + num_seqs)
        first = owners(token, query_start, num_seqs, BLOCK)
        row = tl.load(rows + first)
        start = tl.load(computed + tl.maximum(row, 0), mask=row >= 0, other=0)
        position = start + token - tl.load(query_start + first)
        _fill_tokens(
            tokens,
            blocks,
            token_ids,
            positions,
            slots,
            token,
            row,
            position,
            real & mask,
            mask,
            tokens_stride,
            blocks_stride,
            group_stride,
            slots_stride,
            block_size,
            GROUPS,
        )
    else:
        seqs = (program - token_programs) * BLOCK + tl.arange(0, BLOCK)
        mask = seqs < num_seqs
        row = tl.load(rows + seqs, mask=mask, other=-1)
        begin = tl.load(query_start + seqs, mask=mask, other=0)
        end = tl.load(query_start + seqs + 1, mask=mask, other=0)
        start = tl.load(computed + tl.maximum(row, 0), mask=row >= 0, other=0)
        tl.store(seq_lens + seqs, tl.where(row >= 0, start + end - begin, 0), mask=mask)
        tl.store(table_rows + seqs, tl.maximum(row, 0), mask=mask)
        tl.store(last_tokens + seqs, tl.where(row >= 0, end - 1, 0).to(tl.int64), mask=mask)


@triton.jit
def _fill_tokens(
    tokens,
    blocks,
    token_ids,
    positions,
    slots,
    index,
    row,
    position,
    real,
    mask,
    tokens_stride,
    blocks_stride,
    group_stride,
    slots_stride,
    block_size: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Fill token `index` of the step with token `position` of `row` if it is `real`, else with padding."""
    row = tl.maximum(row, 0).to(tl.int64)
    position = tl.where(real, position, 0).to(tl.int64)
    token_id = tl.load(tokens + row * tokens_stride + position, mask=real, other=0)
    tl.store(token_ids + index, token_id, mask=mask)
    tl.store(positions + index, position, mask=mask)
    for group in tl.static_range(GROUPS):
        table = blocks + group * group_stride + row * blocks_stride
        block = tl.load(table + position // block_size, mask=real, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        tl.store(slots + group * slots_stride + index, tl.where(real, slot, -1), mask=mask)

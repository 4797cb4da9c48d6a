"""Kernels that store drawn tokens in rows and copy them to the CPU, and check drafts against them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..buffers import PIECE, REJECTED, DrawPlaces, OutputRing, RowGuesses, StepBatch, StepBuffers, StepTables
from .inputs import BLOCK, owners


def place_drafts(tables: StepTables, guesses: RowGuesses, batch: StepBatch, places: DrawPlaces) -> None:
    num_draws = len(places.rows)
    _place_drafts[(triton.cdiv(num_draws, BLOCK),)](
        tables.tokens,
        tables.computed,
        guesses.token_ids,
        guesses.first,
        batch.rows,
        batch.query_start,
        batch.samples,
        batch.draw_start,
        places.rows,
        places.positions,
        places.tokens,
        num_draws,
        len(batch.rows),
        tables.tokens.stride(0),
        guesses.token_ids.shape[1],
        BLOCK=BLOCK,
        num_warps=4,
    )


def accept_tokens(drawn: Tensor, tables: StepTables, batch: StepBatch, ring: OutputRing, max_drafts: int) -> None:
    _accept_tokens[(1,)](
        drawn,
        tables.tokens,
        tables.computed,
        batch.rows,
        batch.query_start,
        batch.samples,
        batch.draw_start,
        ring.pages,
        ring.turn,
        len(batch.rows),
        max_drafts,
        tables.tokens.stride(0),
        len(ring.pages),
        ring.pages.stride(0),
        NOT_ACCEPTED=REJECTED,
        BLOCK=PIECE,
        num_warps=4,
    )


def accept_again(
    drawn: Tensor,
    index: Tensor,
    tables: StepTables,
    guesses: RowGuesses,
    batch: StepBatch,
    inputs: StepBuffers,
    ring: OutputRing,
    max_drafts: int,
) -> None:
    _accept_again[(1,)](
        drawn,
        index,
        tables.tokens,
        tables.computed,
        guesses.token_ids,
        guesses.first,
        batch.rows,
        batch.draw_start,
        inputs.seq_lens,
        ring.pages,
        ring.turn,
        len(index),
        max_drafts,
        tables.tokens.stride(0),
        guesses.token_ids.shape[1],
        len(ring.pages),
        ring.pages.stride(0),
        NOT_ACCEPTED=REJECTED,
        BLOCK=PIECE,
        num_warps=4,
    )


def store_tokens(drawn: Tensor, tables: StepTables, batch: StepBatch, inputs: StepBuffers, ring: OutputRing) -> None:
    _store(drawn, drawn, drawn, tables, batch, inputs, ring, again=False)


def replace_tokens(
    drawn: Tensor,
    index: Tensor,
    entries: Tensor,
    tables: StepTables,
    batch: StepBatch,
    inputs: StepBuffers,
    ring: OutputRing,
) -> None:
    _store(drawn, index, entries, tables, batch, inputs, ring, again=True)


def _store(
    drawn: Tensor,
    index: Tensor,
    entries: Tensor,
    tables: StepTables,
    batch: StepBatch,
    inputs: StepBuffers,
    ring: OutputRing,
    *,
    again: bool,
) -> None:
    _store_tokens[(1,)](
        drawn,
        index,
        entries,
        tables.tokens,
        tables.computed,
        batch.rows,
        batch.samples,
        inputs.seq_lens,
        ring.pages,
        ring.turn,
        len(drawn),
        tables.tokens.stride(0),
        len(ring.pages),
        ring.pages.stride(0),
        AGAIN=again,
        BLOCK=PIECE,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_draws", "num_seqs"])
def _place_drafts(
    tokens,
    computed,
    guesses,
    first_guess,
    rows,
    query_start,
    samples,
    draw_start,
    draw_rows,
    draw_positions,
    draw_tokens,
    num_draws,
    num_seqs,
    tokens_stride,
    width,
    BLOCK: tl.constexpr,
):
    draw = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = draw < num_draws
    seq = owners(draw, draw_start, num_seqs, BLOCK)
    row = tl.load(rows + seq)
    real = mask & (row >= 0) & (draw < tl.load(draw_start + num_seqs))
    some_row = tl.maximum(row, 0).to(tl.int64)
    behind = draw - tl.load(draw_start + seq)  # index among the sequence's draws
    token = tl.load(query_start + seq + 1) - tl.load(draw_start + seq + 1) + draw  # the last draw is at the last token
    position = tl.load(computed + some_row, mask=real, other=0) + token - tl.load(query_start + seq)
    number = position - tl.load(first_guess + some_row, mask=real, other=0)
    known = real & (number >= 0) & (number < width)
    guess = tl.load(guesses + some_row * width + number, mask=known, other=0)
    tl.store(tokens + some_row * tokens_stride + position, guess, mask=real & (behind > 0))
    sampled = real & (tl.load(samples + seq) != 0)
    tl.store(draw_rows + draw, tl.where(sampled, row, -1), mask=mask)
    tl.store(draw_positions + draw, tl.where(sampled, position + 1, 0), mask=mask)
    tl.store(draw_tokens + draw, tl.where(real, token, 0).to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "max_drafts"])
def _accept_tokens(
    drawn,
    tokens,
    computed,
    rows,
    query_start,
    samples,
    draw_start,
    pages,
    turn,
    num_seqs,
    max_drafts,
    tokens_stride,
    num_pages,
    page_stride,
    NOT_ACCEPTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accept drafts of all sequences in a single program, which also advances the page."""
    page_number = tl.load(turn)
    page = pages + page_number * page_stride
    for first_seq in range(0, num_seqs, BLOCK):
        seq = first_seq + tl.arange(0, BLOCK)
        mask = seq < num_seqs
        row = tl.load(rows + seq, mask=mask, other=-1)
        real = mask & (row >= 0)
        first = tl.load(draw_start + seq, mask=mask, other=0)
        num_drafts = tl.load(draw_start + seq + 1, mask=mask, other=0) - first - 1
        num_tokens = tl.load(query_start + seq + 1, mask=mask, other=0) - tl.load(query_start + seq, mask=mask, other=0)
        some_row = tl.maximum(row, 0).to(tl.int64)
        position = tl.load(computed + some_row, mask=real, other=0) + num_tokens - num_drafts
        sampled = real & (tl.load(samples + seq, mask=mask, other=0) != 0)
        own = tokens + some_row * tokens_stride + position
        num_right = tl.zeros([BLOCK], tl.int32)
        for number in range(0, max_drafts + 1):
            here = sampled & (number <= num_drafts)
            token = tl.load(drawn + first + number, mask=here, other=0).to(tl.int32)
            kept = here & (num_right == number)  # all drafts before this draw were right
            tl.store(page + first + number, tl.where(kept, token, NOT_ACCEPTED), mask=here)
            draft = tl.load(own + number, mask=kept & (number < num_drafts), other=-1)
            # A row without a token to draw is reported by its page; a step that is already launched continues with 0.
            tl.store(own + number, tl.maximum(token, 0), mask=kept)
            num_right += (kept & (number < num_drafts) & (draft == token)).to(tl.int32)
        tl.store(computed + some_row, position + num_right, mask=real)
    tl.store(turn, (page_number + 1) % num_pages)


@triton.jit(do_not_specialize=["count", "max_drafts", "width"])
def _accept_again(
    drawn,
    index,
    tokens,
    computed,
    guesses,
    first_guess,
    rows,
    draw_start,
    seq_lens,
    pages,
    turn,
    count,
    max_drafts,
    tokens_stride,
    width,
    num_pages,
    page_stride,
    NOT_ACCEPTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accept drafts of some sequences once more. Rows may no longer have them, so they are read from `guesses`."""
    page = pages + ((tl.load(turn) + num_pages - 1) % num_pages) * page_stride
    for first_entry in range(0, count, BLOCK):
        entry = first_entry + tl.arange(0, BLOCK)
        mask = entry < count
        seq = tl.load(index + entry, mask=mask, other=0)
        row = tl.load(rows + seq, mask=mask, other=-1)
        real = mask & (row >= 0)
        some_row = tl.maximum(row, 0).to(tl.int64)
        first = tl.load(draw_start + seq, mask=mask, other=0)
        num_drafts = tl.load(draw_start + seq + 1, mask=mask, other=0) - first - 1
        position = tl.load(seq_lens + seq, mask=real, other=0) - num_drafts
        first_number = position - tl.load(first_guess + some_row, mask=real, other=0)
        own = tokens + some_row * tokens_stride + position
        num_right = tl.zeros([BLOCK], tl.int32)
        for number in range(0, max_drafts + 1):
            here = real & (number <= num_drafts)
            token = tl.load(drawn + first + number, mask=here, other=0).to(tl.int32)
            kept = here & (num_right == number)
            tl.store(page + first + number, tl.where(kept, token, NOT_ACCEPTED), mask=here)
            known = kept & (first_number + number >= 0) & (first_number + number < width)
            draft = tl.load(guesses + some_row * width + first_number + number, mask=known, other=0)
            tl.store(own + number, tl.maximum(token, 0), mask=kept)
            num_right += (kept & (number < num_drafts) & (draft == token)).to(tl.int32)
        tl.store(computed + some_row, position + num_right, mask=real)


@triton.jit(do_not_specialize=["count"])
def _store_tokens(
    drawn,
    index,
    entries,
    tokens,
    computed,
    rows,
    samples,
    seq_lens,
    pages,
    turn,
    count,
    tokens_stride,
    num_pages,
    page_stride,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the drawn tokens in a single program, which also advances the page."""
    number = tl.load(turn)
    page = pages + ((number + num_pages - 1) % num_pages if AGAIN else number) * page_stride
    for first in range(0, count, BLOCK):
        entry = first + tl.arange(0, BLOCK)
        mask = entry < count
        seq = tl.load(index + entry, mask=mask, other=0) if AGAIN else entry
        in_page = tl.load(entries + entry, mask=mask, other=0) if AGAIN else entry
        row = tl.load(rows + seq, mask=mask, other=-1)
        seq_len = tl.load(seq_lens + seq, mask=mask, other=0)
        stored = mask & (row >= 0)
        if not AGAIN:
            stored &= tl.load(samples + seq, mask=mask, other=0) != 0
            tl.store(computed + row, seq_len, mask=mask & (row >= 0))
        token = tl.load(drawn + entry, mask=stored, other=0).to(tl.int32)
        # Rows without a token to draw are reported by the page; a step that is already launched needs a valid token.
        tl.store(tokens + row.to(tl.int64) * tokens_stride + seq_len, tl.maximum(token, 0), mask=stored)
        tl.store(page + in_page, token, mask=stored)
    if not AGAIN:
        tl.store(turn, (number + 1) % num_pages)

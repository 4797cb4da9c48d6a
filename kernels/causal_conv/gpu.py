"""The causal convolution in Triton. A program computes some channels of a chunk of tokens, or of a decode.

It reads each input once, while it computes the ones before; the last three stay in its registers, for any width. The
program of a sequence's first chunk reads the old tail, and also writes the new one, although that is made of the
sequence's last inputs: both are often in the same slot, and so may be the first checkpoint. Other chunks find all of
their inputs among the step's tokens, since no checkpoint makes a chunk shorter than a tail (`state_batch.LEAST_CUT`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl, tuned
from baton.kernels.launch import cdiv
from baton.kernels.state_batch import CHUNK, SOURCE_CUT, StateBatch
from baton.kernels.tuned import Options

STEP: Options = {"CHANNELS": 256, "num_warps": 2}
CHUNKS: Options = {"CHANNELS": 256, "ROWS": 8, "num_warps": 1}
NEAR_CHUNKS = tl.constexpr(SOURCE_CUT // CHUNK)  # the first checkpoint in the source slot ends one of these chunks


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    batch: StateBatch,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
    drafts: Tensor | None = None,
    out: Tensor | None = None,
    step: Options | None = None,
    chunks: Options | None = None,
) -> Tensor:
    """See `baton.kernels.causal_conv.causal_conv`. `step` and `chunks` replace the tuned options."""
    channels, width = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    operands = (x, weight, bias, state, batch.query_start, batch.sources, batch.targets)
    strides = (x.stride(0), state.stride(0), out.stride(0))
    sizes = {"WIDTH": width, "SILU": silu, "NUM_CHANNELS": channels}
    if decodes := batch.most_decodes:
        options = step or tuned.config("causal_conv", x.device, step_key(width, channels, decodes), STEP)
        replay = batch.replay
        convolve_decode_kernel[(cdiv(channels, options["CHANNELS"]), decodes)](
            *operands,
            batch.num_decodes,
            out,
            drafts,
            *((None,) * 3 if replay is None else (replay.rows, replay.starts, replay.counts)),
            *strides,
            0 if drafts is None else drafts.stride(0),
            NUM_PLACES=0 if replay is None else replay.num_places,
            **sizes,
            **options,
            **pdl.launch_options(),
        )
    if batch.num_chunks:
        options = chunks or tuned.config("causal_conv", x.device, chunk_key(width, channels, x.shape[0]), CHUNKS)
        lists = (batch.chunk_start, batch.chunk_seqs, batch.checkpoints)
        convolve_chunk_kernel[(cdiv(channels, options["CHANNELS"]), batch.num_chunks)](
            *operands, *lists, out, *strides, **sizes, **options, **pdl.launch_options()
        )
    return out


def step_key(width: int, channels: int, num_seqs: int) -> tuned.Key:
    return {"kernel": "step", "width": str(width), "channels": channels, "num_seqs": num_seqs}


def chunk_key(width: int, channels: int, num_tokens: int) -> tuned.Key:
    return {"kernel": "chunks", "width": str(width), "channels": channels, "num_tokens": num_tokens}


@triton.jit
def convolve_chunk_kernel(
    x,  # [T, NUM_CHANNELS], tokens x_stride apart
    weight,  # [NUM_CHANNELS, WIDTH]
    bias,  # [NUM_CHANNELS] or None
    state,  # [slots, NUM_CHANNELS, WIDTH - 1], slots state_stride apart
    query_start,
    sources,
    targets,
    chunk_start,
    chunk_seqs,
    checkpoints,
    out,  # [T, NUM_CHANNELS], tokens out_stride apart
    x_stride,
    state_stride,
    out_stride,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a program
    ROWS: tl.constexpr,  # tokens that it takes at a time
):
    pdl.let_next_start()
    chunk = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < NUM_CHANNELS
    first = tl.load(chunk_start + chunk)
    count = tl.load(chunk_start + chunk + 1) - first
    seq = tl.load(chunk_seqs + chunk)
    begin = tl.load(query_start + seq)
    length = tl.load(query_start + seq + 1) - begin
    source = tl.load(sources + seq).to(tl.int64)
    target = tl.load(targets + seq).to(tl.int64)
    checkpoint = tl.load(checkpoints + chunk).to(tl.int64)
    inputs = x + begin.to(tl.int64) * x_stride
    results = out + begin.to(tl.int64) * out_stride
    tail = state + source * state_stride
    start = first - begin
    newest, second, third, oldest = _factors(weight, channel, WIDTH, NUM_CHANNELS)
    shift = tl.zeros([CHANNELS], tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    pdl.wait_for_previous()
    if count == 0:
        return
    before1, before2, before3 = _before(inputs, x_stride, tail, source, start, channel, WIDTH, NUM_CHANNELS)
    ahead = _rows(inputs, x_stride, start, 0, count, channel, NUM_CHANNELS, ROWS)
    for at in range(0, count, ROWS):
        values = ahead
        ahead = _rows(inputs, x_stride, start, at + ROWS, count, channel, NUM_CHANNELS, ROWS)
        cells = results + (start + at).to(tl.int64) * out_stride + channel
        for index in tl.static_range(ROWS):
            value = values[index].to(tl.float32)
            total = shift + oldest * before3 + third * before2 + second * before1 + newest * value
            known = _where(at + index < count, channel, NUM_CHANNELS)
            tl.store(cells + index * out_stride, _activated(total, SILU).to(out.dtype.element_ty), mask=known)
            before3 = before2
            before2 = before1
            before1 = value
    if (checkpoint >= 0) & (checkpoint != source):
        last = _before(inputs, x_stride, tail, source, start + count, channel, WIDTH, NUM_CHANNELS)
        _store_tail(state + checkpoint * state_stride, last, channel, WIDTH, NUM_CHANNELS)
    if start == 0:  # this program reads the old tail, so it also writes everything that may go to the same slot
        last = _before(inputs, x_stride, tail, source, length, channel, WIDTH, NUM_CHANNELS)
        cut = _cut_in_source(chunk_start, checkpoints, chunk, source, begin, length)
        kept = _before(inputs, x_stride, tail, source, cut, channel, WIDTH, NUM_CHANNELS)
        tl.debug_barrier()  # all warps have read the old tail
        if cut > 0:
            _store_tail(state + source * state_stride, kept, channel, WIDTH, NUM_CHANNELS)
        if target >= 0:
            _store_tail(state + target * state_stride, last, channel, WIDTH, NUM_CHANNELS)


@triton.jit
def _rows(inputs, x_stride, start, at, count, channel, NUM_CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """Return the inputs [CHANNELS] of ROWS tokens of a chunk from `at` on; 0 behind its end."""
    row = inputs + (start + at).to(tl.int64) * x_stride + channel
    values = ()
    for index in tl.static_range(ROWS):
        known = _where(at + index < count, channel, NUM_CHANNELS)
        values = values + (tl.load(row + index * x_stride, mask=known, other=0.0),)
    return values


@triton.jit
def _cut_in_source(chunk_start, checkpoints, chunk, source, begin, length):
    """Return after how many of a sequence's tokens a checkpoint goes to its source slot; 0 if none does.

    `chunk` is the sequence's first. Only the first checkpoint may go there, so the chunks before it are whole.
    """
    near = chunk + tl.arange(0, NEAR_CHUNKS)
    exists = near < tl.num_programs(1)
    end = tl.load(chunk_start + near + 1, mask=exists, other=0) - begin
    slot = tl.load(checkpoints + near, mask=exists, other=-1)
    is_it = exists & (end <= length) & (slot == source) & (slot >= 0)
    return tl.max(tl.where(is_it, end, 0), 0)


@triton.jit
def convolve_decode_kernel(
    x,
    weight,
    bias,
    state,
    query_start,
    sources,
    targets,
    num_decodes,
    out,
    drafts,  # [places, NUM_CHANNELS], places drafts_stride apart; None: no decode has drafts
    replay_rows,
    replay_starts,
    replay_counts,
    x_stride,
    state_stride,
    out_stride,
    drafts_stride,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    NUM_PLACES: tl.constexpr,  # of a row, 0 without drafts
    CHANNELS: tl.constexpr,
):
    pdl.let_next_start()
    seq = tl.program_id(1)
    first_channel = tl.program_id(0) * CHANNELS
    channel = first_channel + tl.arange(0, CHANNELS // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    exists = channel < NUM_CHANNELS
    begin = tl.load(query_start + seq)
    length = tl.load(query_start + seq + 1) - begin
    length = tl.where(seq < tl.load(num_decodes), length, 0)
    source = tl.load(sources + seq).to(tl.int64)
    target = tl.load(targets + seq).to(tl.int64)
    inputs = x + begin.to(tl.int64) * x_stride
    results = out + begin.to(tl.int64) * out_stride
    factors = _load_columns(weight, first_channel, True, CHANNELS, WIDTH, NUM_CHANNELS)
    newest, second, third, oldest = _last_first(factors, WIDTH, 4)
    shift = tl.zeros(channel.shape, tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
    pdl.wait_for_previous()
    tail = _load_columns(state + source * state_stride, first_channel, source >= 0, CHANNELS, WIDTH - 1, NUM_CHANNELS)
    before1, before2, before3 = _last_first(tail, WIDTH - 1, 3)
    if NUM_PLACES > 0:
        own = tl.load(replay_rows + seq).to(tl.int64) * NUM_PLACES
        start = tl.load(replay_starts + seq)
        count = tl.where(length > 0, tl.load(replay_counts + seq), 0)
        for position in range(start - count, start):
            cells = drafts + (own + position % NUM_PLACES) * drafts_stride + channel
            before3 = before2
            before2 = before1
            before1 = tl.load(cells, mask=exists, other=0.0).to(tl.float32)
    last1, last2, last3 = before1, before2, before3
    for position in range(0, length):
        cell = tl.cast(position, tl.int64)
        value = tl.load(inputs + cell * x_stride + channel, mask=exists, other=0.0).to(tl.float32)
        total = shift + oldest * before3 + third * before2 + second * before1 + newest * value
        result = _activated(total, SILU).to(out.dtype.element_ty)
        tl.store(results + cell * out_stride + channel, result, mask=exists)
        before3 = before2
        before2 = before1
        before1 = value
        if NUM_PLACES > 0:
            if position == 0:
                last1, last2, last3 = before1, before2, before3
            else:
                cells = drafts + (own + (start + position) % NUM_PLACES) * drafts_stride + channel
                tl.store(cells, value.to(drafts.dtype.element_ty), mask=exists)
        else:
            last1, last2, last3 = before1, before2, before3
    tl.debug_barrier()  # all warps have read the old tail, which may be in the same slot
    if target >= 0 and length > 0:
        own_tail = state + target * state_stride
        _store_columns(own_tail, (last3, last2, last1), first_channel, CHANNELS, WIDTH - 1, NUM_CHANNELS)


@triton.jit
def _load_columns(rows, first_channel, exist, CHANNELS: tl.constexpr, COUNT: tl.constexpr, NUM_CHANNELS: tl.constexpr):
    """Return the COUNT columns of `rows` [NUM_CHANNELS, COUNT], each as a tile [CHANNELS / 4, 4]; zeros unless `exist`.

    A thread loads the rows of four neighbouring channels with COUNT wide loads, and sorts their values in registers.
    """
    group = tl.arange(0, CHANNELS // 4)[:, None] * (4 * COUNT) + tl.arange(0, 4)[None, :]
    values = ()
    for word in tl.static_range(COUNT):
        cell = first_channel * COUNT + group + 4 * word
        known = cell < tl.where(exist, NUM_CHANNELS * COUNT, 0)
        values = values + _parts(tl.load(rows + cell, mask=known, other=0.0))
    columns = ()
    for column in tl.static_range(COUNT):
        columns = columns + (
            _whole(values[column], values[COUNT + column], values[2 * COUNT + column], values[3 * COUNT + column]),
        )
    return columns


@triton.jit
def _last_first(columns, COUNT: tl.constexpr, MOST: tl.constexpr):
    """Return the COUNT columns in float32 and opposite order, and zeros for the others of MOST."""
    result = ()
    for back in tl.static_range(MOST):
        if back < COUNT:
            result = result + (columns[COUNT - 1 - back].to(tl.float32),)
        else:
            result = result + (tl.zeros(columns[0].shape, tl.float32),)
    return result


@triton.jit
def _store_columns(rows, last, first_channel, CHANNELS: tl.constexpr, COUNT: tl.constexpr, NUM_CHANNELS: tl.constexpr):
    """Store the last COUNT of the three tiles `last` as the columns of `rows` [NUM_CHANNELS, COUNT]."""
    dtype: tl.constexpr = rows.dtype.element_ty
    parts = _parts(last[0].to(dtype)) + _parts(last[1].to(dtype)) + _parts(last[2].to(dtype))
    values = ()
    for channel in tl.static_range(4):
        for column in tl.static_range(3 - COUNT, 3):
            values = values + (parts[4 * column + channel],)
    group = tl.arange(0, CHANNELS // 4)[:, None] * (4 * COUNT) + tl.arange(0, 4)[None, :]
    for word in tl.static_range(COUNT):
        cell = first_channel * COUNT + group + 4 * word
        own = _whole(values[4 * word], values[4 * word + 1], values[4 * word + 2], values[4 * word + 3])
        tl.store(rows + cell, own, mask=cell < NUM_CHANNELS * COUNT)


@triton.jit
def _parts(tile):
    """Return the four columns of a tile [N, 4]."""
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _whole(first, second, third, fourth):
    """Return the tile [N, 4] with these columns."""
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(pairs, (first.shape[0], 4))


@triton.jit
def _activated(total, SILU: tl.constexpr):
    result = total
    if SILU:
        result = total / (1.0 + tl.exp(-total))
    return result


@triton.jit
def _factors(weight, channel, WIDTH: tl.constexpr, NUM_CHANNELS: tl.constexpr):
    """Return the factors [CHANNELS] of the newest input and of the three before it; 0 beyond the width."""
    exists = channel < NUM_CHANNELS
    last = weight + channel * WIDTH + WIDTH - 1
    newest = tl.load(last, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(last - 1, mask=exists, other=0.0).to(tl.float32)
    third = tl.zeros(channel.shape, tl.float32)
    oldest = third
    if WIDTH > 2:
        third = tl.load(last - 2, mask=exists, other=0.0).to(tl.float32)
    if WIDTH > 3:
        oldest = tl.load(last - 3, mask=exists, other=0.0).to(tl.float32)
    return newest, second, third, oldest


@triton.jit
def _before(inputs, x_stride, tail, source, end, channel, WIDTH: tl.constexpr, NUM_CHANNELS: tl.constexpr):
    """Return the three inputs [CHANNELS] before `end` in float32, newest first; 0 beyond the width."""
    first = _input(inputs, x_stride, tail, source, end - 1, channel, WIDTH, NUM_CHANNELS)
    second = _input(inputs, x_stride, tail, source, end - 2, channel, WIDTH, NUM_CHANNELS)
    third = _input(inputs, x_stride, tail, source, end - 3, channel, WIDTH, NUM_CHANNELS)
    return first, second, third


@triton.jit
def _input(inputs, x_stride, tail, source, place, channel, WIDTH: tl.constexpr, NUM_CHANNELS: tl.constexpr):
    """Return the input [CHANNELS] at `place` of a sequence. If that is negative, it is from the tail, or 0."""
    is_token, in_tail = place >= 0, (place < 0) & (place >= 1 - WIDTH) & (source >= 0)
    cells = inputs + place.to(tl.int64) * x_stride + channel
    value = tl.load(cells, mask=_where(is_token, channel, NUM_CHANNELS), other=0.0).to(tl.float32)
    cells = tail + channel * (WIDTH - 1) + WIDTH - 1 + place
    return value + tl.load(cells, mask=_where(in_tail, channel, NUM_CHANNELS), other=0.0).to(tl.float32)


@triton.jit
def _where(condition, channel, NUM_CHANNELS: tl.constexpr):
    """Return the mask of existing channels, and of none if the scalar `condition` is false."""
    return channel < tl.where(condition, NUM_CHANNELS, 0)


@triton.jit
def _store_tail(tail, last, channel, WIDTH: tl.constexpr, NUM_CHANNELS: tl.constexpr):
    """Store the last inputs, newest first, as a tail."""
    for index in tl.static_range(WIDTH - 1):
        cells = tail + channel * (WIDTH - 1) + WIDTH - 2 - index
        tl.store(cells, last[index].to(tail.dtype.element_ty), mask=channel < NUM_CHANNELS)

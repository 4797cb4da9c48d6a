"""The causal convolution in Triton. A program has some channels, of a chunk of tokens or of a decode.

The program of a sequence's first chunk is the one that reads the old tail, and so it is the one that writes the new
one, which lies at the sequence's end: both are often the same slot. Other chunks find all of their inputs among the
tokens, since no checkpoint cuts a chunk shorter than a tail (`state_batch.LEAST_CUT`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl, tuned
from baton.kernels.launch import cdiv
from baton.kernels.state_batch import StateBatch
from baton.kernels.tuned import Options

STEP: Options = {"CHANNELS": 256, "num_warps": 2}
CHUNKS: Options = {"CHANNELS": 256, "ROWS": 8, "num_warps": 4}


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    batch: StateBatch,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
    out: Tensor | None = None,
    step: Options | None = None,
    chunks: Options | None = None,
) -> Tensor:
    """See `baton.kernels.causal_conv.causal_conv`; `step` and `chunks` are options to use instead of the tuned ones."""
    channels, width = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    operands = (x, weight, bias, state, batch.query_start, batch.sources, batch.targets)
    strides = (x.stride(0), state.stride(0), out.stride(0))
    sizes = {"WIDTH": width, "SILU": silu, "NUM_CHANNELS": channels}
    if batch.num_decodes:
        options = step or tuned.config("causal_conv", x.device, step_key(width, channels, batch.num_decodes), STEP)
        _convolve_decode[(cdiv(channels, options["CHANNELS"]), batch.num_decodes)](
            *operands, out, *strides, **sizes, **options, **pdl.launch_options()
        )
    if batch.num_chunks:
        options = chunks or tuned.config("causal_conv", x.device, chunk_key(width, channels, x.shape[0]), CHUNKS)
        lists = (batch.chunk_start, batch.chunk_seqs, batch.checkpoints)
        _convolve_chunk[(cdiv(channels, options["CHANNELS"]), batch.num_chunks)](
            *operands, *lists, out, *strides, **sizes, **options, **pdl.launch_options()
        )
    return out


def step_key(width: int, channels: int, num_seqs: int) -> tuned.Key:
    return {"kernel": "step", "width": str(width), "channels": channels, "num_seqs": num_seqs}


def chunk_key(width: int, channels: int, num_tokens: int) -> tuned.Key:
    return {"kernel": "chunks", "width": str(width), "channels": channels, "num_tokens": num_tokens}


@triton.jit
def _convolve_chunk(
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
    pdl.wait_for_previous()
    for at in range(0, count, ROWS):
        position = start + at + tl.arange(0, ROWS)
        total = tl.zeros([ROWS, CHANNELS], tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=channel < NUM_CHANNELS, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            factor = tl.load(weight + channel * WIDTH + tap, mask=channel < NUM_CHANNELS, other=0.0).to(tl.float32)
            place = position - (WIDTH - 1 - tap)
            known = (position < start + count) & (place >= 0)
            cells = inputs + place.to(tl.int64)[:, None] * x_stride + channel[None, :]
            value = tl.load(cells, mask=known[:, None] & (channel < NUM_CHANNELS)[None, :], other=0.0)
            if start + at < WIDTH - 1 and source >= 0:
                before = (place < 0) & (place >= 1 - WIDTH)
                cells = tail + channel[None, :] * (WIDTH - 1) + (place + WIDTH - 1)[:, None]
                value += tl.load(cells, mask=before[:, None] & (channel < NUM_CHANNELS)[None, :], other=0.0)
            total += value.to(tl.float32) * factor[None, :]
        cells = results + position.to(tl.int64)[:, None] * out_stride + channel[None, :]
        known = (position < start + count)[:, None] & (channel < NUM_CHANNELS)[None, :]
        tl.store(cells, _activated(total, SILU).to(out.dtype.element_ty), mask=known)
    if checkpoint >= 0:
        values = _last_inputs(inputs, x_stride, tail, source, start + count, channel, WIDTH, NUM_CHANNELS)
        _store_tail(state + checkpoint * state_stride, values, channel, WIDTH, NUM_CHANNELS)
    if start == 0:
        values = _last_inputs(inputs, x_stride, tail, source, length, channel, WIDTH, NUM_CHANNELS)
        tl.debug_barrier()  # all warps have read the old tail, which may lie there
        if target >= 0:
            _store_tail(state + target * state_stride, values, channel, WIDTH, NUM_CHANNELS)


@triton.jit
def _convolve_decode(
    x,
    weight,
    bias,
    state,
    query_start,
    sources,
    targets,
    out,
    x_stride,
    state_stride,
    out_stride,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    pdl.let_next_start()
    seq = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < NUM_CHANNELS
    begin = tl.load(query_start + seq)
    length = tl.load(query_start + seq + 1) - begin
    source = tl.load(sources + seq).to(tl.int64)
    target = tl.load(targets + seq).to(tl.int64)
    inputs = x + begin.to(tl.int64) * x_stride
    results = out + begin.to(tl.int64) * out_stride
    tail = state + source * state_stride
    pdl.wait_for_previous()
    for position in range(0, length):
        total = tl.zeros([CHANNELS], tl.float32)
        if bias is not None:
            total += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
        for tap in tl.static_range(WIDTH):
            factor = tl.load(weight + channel * WIDTH + tap, mask=exists, other=0.0).to(tl.float32)
            place = position - (WIDTH - 1 - tap)
            total += _input(inputs, x_stride, tail, source, place, channel, WIDTH, NUM_CHANNELS).to(tl.float32) * factor
        cells = results + tl.cast(position, tl.int64) * out_stride + channel
        tl.store(cells, _activated(total, SILU).to(out.dtype.element_ty), mask=exists)
    values = _last_inputs(inputs, x_stride, tail, source, length, channel, WIDTH, NUM_CHANNELS)
    tl.debug_barrier()  # all warps have read the old tail, which may lie there
    if target >= 0 and length > 0:
        _store_tail(state + target * state_stride, values, channel, WIDTH, NUM_CHANNELS)


@triton.jit
def _activated(total, SILU: tl.constexpr):
    result = total
    if SILU:
        result = total / (1.0 + tl.exp(-total))
    return result


@triton.jit
def _input(inputs, x_stride, tail, source, place, channel, WIDTH: tl.constexpr, NUM_CHANNELS: tl.constexpr):
    """Return the input [CHANNELS] at `place` of a sequence, which is in its tail where that is negative."""
    exists = channel < NUM_CHANNELS
    value = tl.zeros(channel.shape, inputs.dtype.element_ty)
    if place >= 0:
        value = tl.load(inputs + tl.cast(place, tl.int64) * x_stride + channel, mask=exists, other=0.0)
    else:
        if source >= 0:
            value = tl.load(tail + channel * (WIDTH - 1) + WIDTH - 1 + place, mask=exists, other=0.0)
    return value


@triton.jit
def _last_inputs(inputs, x_stride, tail, source, end, channel, WIDTH: tl.constexpr, NUM_CHANNELS: tl.constexpr):
    """Return the WIDTH - 1 inputs before `end`, oldest first."""
    values = ()
    for index in tl.static_range(WIDTH - 1):
        place = end - (WIDTH - 1) + index
        values = values + (_input(inputs, x_stride, tail, source, place, channel, WIDTH, NUM_CHANNELS),)
    return values


@triton.jit
def _store_tail(tail, values, channel, WIDTH: tl.constexpr, NUM_CHANNELS: tl.constexpr):
    for index in tl.static_range(WIDTH - 1):
        tl.store(tail + channel * (WIDTH - 1) + index, values[index], mask=channel < NUM_CHANNELS)

"""Kernels of all_reduce (in one shot and in two), all_gather and reduce_scatter: see `gpu/__init__.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from .lamport import EMPTY_VALUE, EMPTY_WORD, VALUES_PER_VECTOR, begin, end, receive, sent, sum_of


@triton.jit(do_not_specialize=["num_vectors", "steps", "rank"])
def one_shot(
    x,  # [8 * num_vectors] of 16 bits, summed in place
    addresses,  # [RANKS] int64
    turns,  # [CHANNELS] int32
    ended,  # [1] int32
    num_vectors,
    steps,  # blocks of a program
    rank,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = num_vectors * VALUES_PER_VECTOR
    lanes = tl.arange(0, BLOCK)[None, :]
    channel, turn, start, ranks, receivers, own = begin(addresses, turns, rank, tl.int16, RANKS, ROOM)
    for step in range(steps):
        at = (step * tl.num_programs(0) + channel) * BLOCK + lanes
        bits = sent(tl.load(x + at, mask=at < size, other=0.0).to(tl.int16, bitcast=True), EMPTY_VALUE)
        slot = start + (step * RANKS + rank) * BLOCK + lanes
        tl.store(receivers + slot, bits, mask=(ranks < RANKS) & (at < size))
    for step in range(steps):
        at = (step * tl.num_programs(0) + channel) * BLOCK + lanes
        slots = start + (step * RANKS + ranks) * BLOCK + lanes
        came = receive(own + slots, (ranks < RANKS) & (at < size), EMPTY_VALUE, ended, BLOCK)
        tl.store(x + at, sum_of(came, x.dtype.element_ty), mask=at < size)
    end(turns, channel, turn)


@triton.jit(do_not_specialize=["num_vectors", "steps", "rank"])
def two_shots(
    x,  # [8 * num_vectors] of 16 bits, summed in place
    addresses,  # [RANKS] int64
    turns,  # [CHANNELS] int32
    ended,  # [1] int32
    num_vectors,
    steps,  # blocks of a program, for each rank
    rank,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = num_vectors * VALUES_PER_VECTOR
    lanes = tl.arange(0, BLOCK)[None, :]
    channel, turn, parts, ranks, receivers, own = begin(addresses, turns, rank, tl.int16, RANKS, ROOM)
    sums = parts + steps * RANKS * BLOCK
    for step in range(steps):
        block = (step * tl.num_programs(0) + channel) * RANKS
        at = (block + ranks) * BLOCK + lanes
        mask = (ranks < RANKS) & (at < size)
        bits = sent(tl.load(x + at, mask=mask, other=0.0).to(tl.int16, bitcast=True), EMPTY_VALUE)
        tl.store(receivers + parts + (step * RANKS + rank) * BLOCK + lanes, bits, mask=mask)
    for step in range(steps):
        block = (step * tl.num_programs(0) + channel) * RANKS
        mask = (ranks < RANKS) & ((block + rank) * BLOCK + lanes < size)
        slots = parts + (step * RANKS + ranks) * BLOCK + lanes
        total = sum_of(receive(own + slots, mask, EMPTY_VALUE, ended, BLOCK), x.dtype.element_ty)
        bits = sent(total.to(tl.int16, bitcast=True), EMPTY_VALUE)
        tl.store(receivers + sums + (step * RANKS + rank) * BLOCK + lanes, bits, mask=mask)
    for step in range(steps):
        block = (step * tl.num_programs(0) + channel) * RANKS
        at = (block + ranks) * BLOCK + lanes
        mask = (ranks < RANKS) & (at < size)
        slots = sums + (step * RANKS + ranks) * BLOCK + lanes
        bits = receive(own + slots, mask, EMPTY_VALUE, ended, BLOCK)
        tl.store(x + at, bits.to(x.dtype.element_ty, bitcast=True), mask=mask)
    end(turns, channel, turn)


@triton.jit(do_not_specialize=["num_vectors", "steps", "rank"])
def gather_parts(
    x,  # [8 * num_vectors] of 16 bits
    gathered,  # [RANKS, 8 * num_vectors], written
    addresses,  # [RANKS] int64
    turns,  # [CHANNELS] int32
    ended,  # [1] int32
    num_vectors,
    steps,  # blocks of a program
    rank,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather 32-bit words of two values: words arrive atomically, and only one bit pattern of a word means empty."""
    WORDS: tl.constexpr = BLOCK // 2
    size = num_vectors * (VALUES_PER_VECTOR // 2)
    lanes = tl.arange(0, WORDS)[None, :]
    channel, turn, start, ranks, receivers, own = begin(addresses, turns, rank, tl.int32, RANKS, ROOM // 2)
    others = (ranks < RANKS) & (ranks != rank)
    given = x.to(tl.pointer_type(tl.int32), bitcast=True)
    taken = gathered.to(tl.pointer_type(tl.int32), bitcast=True)
    for step in range(steps):
        at = (step * tl.num_programs(0) + channel) * WORDS + lanes
        words = sent(tl.load(given + at, mask=at < size, other=0), EMPTY_WORD)
        slot = start + (step * RANKS + rank) * WORDS + lanes
        tl.store(receivers + slot, words, mask=others & (at < size))
        tl.store(taken + rank * size + at, words, mask=at < size)
    for step in range(steps):
        at = (step * tl.num_programs(0) + channel) * WORDS + lanes
        slots = start + (step * RANKS + ranks) * WORDS + lanes
        mask = others & (at < size)
        words = receive(own + slots, mask, EMPTY_WORD, ended, WORDS)
        tl.store(taken + ranks * size + at, words, mask=mask)
    end(turns, channel, turn)


@triton.jit(do_not_specialize=["num_vectors", "steps", "rank"])
def sum_own_part(
    x,  # [RANKS, 8 * num_vectors] of 16 bits
    total,  # [8 * num_vectors], written
    addresses,  # [RANKS] int64
    turns,  # [CHANNELS] int32
    ended,  # [1] int32
    num_vectors,
    steps,  # blocks of a program, for each rank
    rank,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    size = num_vectors * VALUES_PER_VECTOR
    lanes = tl.arange(0, BLOCK)[None, :]
    channel, turn, start, ranks, receivers, own = begin(addresses, turns, rank, tl.int16, RANKS, ROOM)
    for step in range(steps):
        at = (step * tl.num_programs(0) + channel) * BLOCK + lanes
        mask = (ranks < RANKS) & (at < size)
        bits = sent(tl.load(x + ranks * size + at, mask=mask, other=0.0).to(tl.int16, bitcast=True), EMPTY_VALUE)
        tl.store(receivers + start + (step * RANKS + rank) * BLOCK + lanes, bits, mask=mask)
    for step in range(steps):
        at = (step * tl.num_programs(0) + channel) * BLOCK + lanes
        slots = start + (step * RANKS + ranks) * BLOCK + lanes
        came = receive(own + slots, (ranks < RANKS) & (at < size), EMPTY_VALUE, ended, BLOCK)
        tl.store(total + at, sum_of(came, x.dtype.element_ty), mask=at < size)
    end(turns, channel, turn)

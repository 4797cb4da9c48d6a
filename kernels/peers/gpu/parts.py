"""all_gather and reduce_scatter: what ranks give or get is a part of the whole, in rank order."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels import pdl

from .arrivals import (
    EMPTY_VALUE,
    EMPTY_WORD,
    VALUES_PER_VECTOR,
    memory_of,
    own_memory,
    receive,
    sent,
    start_of,
    sum_of,
)


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
    """In words of two values: whole words are seen at once, and few bits are mistaken for an empty one."""
    pdl.let_next_start()
    channel = tl.program_id(0)
    WORDS: tl.constexpr = BLOCK // 2
    size = num_vectors * (VALUES_PER_VECTOR // 2)
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))[:, None]
    lanes = tl.arange(0, WORDS)[None, :]
    others = (ranks < RANKS) & (ranks != rank)
    receivers = memory_of(addresses, ranks, tl.int32, RANKS)
    own = own_memory(addresses, rank, tl.int32)
    given = x.to(tl.pointer_type(tl.int32), bitcast=True)
    taken = gathered.to(tl.pointer_type(tl.int32), bitcast=True)
    pdl.wait_for_previous()
    turn = tl.load(turns + channel)
    start = start_of(turn, channel, ROOM // 2)
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
    tl.debug_barrier()
    tl.store(turns + channel, turn + 1)


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
    pdl.let_next_start()
    channel = tl.program_id(0)
    size = num_vectors * VALUES_PER_VECTOR
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    receivers = memory_of(addresses, ranks, tl.int16, RANKS)
    own = own_memory(addresses, rank, tl.int16)
    pdl.wait_for_previous()
    turn = tl.load(turns + channel)
    start = start_of(turn, channel, ROOM)
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
    tl.debug_barrier()
    tl.store(turns + channel, turn + 1)

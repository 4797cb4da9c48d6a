"""Kernels of dispatch and combine: a token's row is sent to the ranks that have one of its experts, and partial sums
come back.

A rank without any expert of a token neither gets its row nor waits for it. Each rank knows which rows come from the
tokens' routing, which is sent to all ranks, ahead of the row and with every block of it. In `combine`, both sides know
this already. There, a row that was not sent to a rank comes back as one vector of zeros: the protocol of two turns (see
`peer_memory`) relies on every program receiving something from every rank in every turn.

In one iteration, a program handles the same block of the same row index of all ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..options import ROUTING_VALUES
from .lamport import EMPTY_VALUE, EMPTY_WORD, VALUES_PER_VECTOR, begin, end, receive, sent, sum_of

_ROUTING_WORDS = tl.constexpr(ROUTING_VALUES // 2)


@triton.jit(do_not_specialize=["num_tokens", "rank", "num_experts", "first_place", "places_apart", "num_places"])
def bring_tokens(
    x,  # [T, HIDDEN] of 16 bits
    expert_ids,  # [T, TOP_K] int32, -1: none
    weights,  # [T, TOP_K] float32
    places,  # [E, REPLICAS] int32: where the replicas of each expert lie
    counts,  # [E] int32: how many it has
    loads,  # [E] int64, to which this rank's tokens are added
    brought,  # [RANKS, T, HIDDEN]: only rows with an expert on this rank are written
    brought_ids,  # [RANKS, T, TOP_K] int32, written: places on this rank, or -1
    brought_weights,  # [RANKS, T, TOP_K] float32, written
    visits,  # [2, RANKS, T] int32, written: whether that rank's token came here; whether this rank's token went there
    addresses,  # [RANKS] int64
    turns,  # [CHANNELS] int32
    ended,  # [1] int32
    num_tokens,  # T
    rank,
    num_experts,  # E: ids from E on are no experts
    first_place,  # first place of rank 0
    places_apart,  # distance between the first places of two consecutive ranks
    num_places,  # number of places of each rank
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    REPLICAS: tl.constexpr,
):
    WORDS: tl.constexpr = BLOCK // 2
    ROW: tl.constexpr = HIDDEN // 2
    BLOCKS: tl.constexpr = (ROW + WORDS - 1) // WORDS
    SLOT: tl.constexpr = _ROUTING_WORDS + WORDS
    HALF: tl.constexpr = _ROUTING_WORDS // 2  # the first half has ids, the second one weights
    lanes = tl.arange(0, WORDS)[None, :]
    choice = lanes % HALF
    is_id = (lanes < HALF) & (choice < TOP_K)
    is_weight = (lanes >= HALF) & (lanes < _ROUTING_WORDS) & (choice < TOP_K)
    channel, turn, start, ranks, receivers, own = begin(addresses, turns, rank, tl.int32, RANKS, ROOM // 2)
    others = (ranks < RANKS) & (ranks != rank)
    own_place = first_place + rank * places_apart
    given = x.to(tl.pointer_type(tl.int32), bitcast=True)
    given_weights = weights.to(tl.pointer_type(tl.int32), bitcast=True)
    taken = brought.to(tl.pointer_type(tl.int32), bitcast=True)
    taken_weights = brought_weights.to(tl.pointer_type(tl.int32), bitcast=True)
    programs = tl.num_programs(0)
    for item in range(channel, num_tokens * BLOCKS, programs):
        token, block = item // BLOCKS, item % BLOCKS
        column = block * WORDS + lanes
        row = sent(tl.load(given + token * ROW + column, mask=column < ROW, other=0), EMPTY_WORD)
        at = token * TOP_K + choice
        expert = tl.load(expert_ids + at, mask=is_id, other=-1)
        routed = is_id & (expert >= 0) & (expert < num_experts)
        number = rank * num_tokens + token  # index among all ranks' tokens, by which replicas are chosen in turn
        at_place = expert * REPLICAS
        if REPLICAS > 1:
            at_place += number % tl.load(counts + expert, mask=routed, other=1)
        place = tl.load(places + at_place, mask=routed, other=-1)
        weight = tl.load(given_weights + at, mask=is_weight, other=0)
        words = sent(tl.where(is_id, place, weight), EMPTY_WORD)
        goes = _local(words, is_id, first_place + ranks * places_apart, num_places) >= 0
        goes = tl.max(goes.to(tl.int32), axis=1, keep_dims=True)
        slot = start + (item // programs * RANKS + rank) * SLOT + lanes
        tl.store(receivers + slot, words, mask=others & (is_id | is_weight))
        tl.store(receivers + slot + _ROUTING_WORDS, row, mask=others & (goes != 0) & (column < ROW))
        stays = tl.max(tl.where(ranks == rank, goes, 0), axis=0, keep_dims=True) != 0
        tl.store(taken + number * ROW + column, row, mask=stays & (column < ROW))
        if block == 0:
            to = number * TOP_K + choice
            tl.store(brought_ids + to, _local(words, is_id, own_place, num_places), mask=is_id)
            tl.store(taken_weights + to, words, mask=is_weight)
            visit = visits + ranks * num_tokens + token
            tl.store(visit, goes, mask=ranks == rank)
            tl.store(visit + RANKS * num_tokens, goes, mask=ranks < RANKS)
            tl.atomic_add(loads + expert, tl.full(expert.shape, 1, tl.int64), mask=routed, sem="relaxed")
    for item in range(channel, num_tokens * BLOCKS, programs):
        token, block = item // BLOCKS, item % BLOCKS
        column = block * WORDS + lanes
        slots = start + (item // programs * RANKS + ranks) * SLOT + lanes
        words = receive(own + slots, others & (is_id | is_weight), EMPTY_WORD, ended, WORDS)
        local = _local(words, is_id, own_place, num_places)
        comes = tl.max((local >= 0).to(tl.int32), axis=1, keep_dims=True)
        number = ranks * num_tokens + token
        if block == 0:
            to = number * TOP_K + choice
            tl.store(brought_ids + to, local, mask=others & is_id)
            tl.store(taken_weights + to, words, mask=others & is_weight)
            tl.store(visits + number, comes, mask=others)
        wanted = others & (comes != 0) & (column < ROW)
        row = receive(own + slots + _ROUTING_WORDS, wanted, EMPTY_WORD, ended, WORDS)
        tl.store(taken + number * ROW + column, row, mask=wanted)
    end(turns, channel, turn)


@triton.jit(do_not_specialize=["num_tokens", "rank"])
def sum_tokens(
    x,  # [RANKS, T, HIDDEN] of 16 bits; only rows that came here are read
    total,  # [T, HIDDEN], written
    visits,  # [2, RANKS, T] int32, as `bring_tokens` writes it
    addresses,  # [RANKS] int64
    turns,  # [CHANNELS] int32
    ended,  # [1] int32
    num_tokens,  # T
    rank,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Compute the same bits as `sum_own_part` would with zeros in rows that were not dispatched."""
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    lanes = tl.arange(0, BLOCK)[None, :]
    channel, turn, start, ranks, receivers, own = begin(addresses, turns, rank, tl.int16, RANKS, ROOM)
    programs = tl.num_programs(0)
    for item in range(channel, num_tokens * BLOCKS, programs):
        token, column = item // BLOCKS, item % BLOCKS * BLOCK + lanes
        inside = (ranks < RANKS) & (column < HIDDEN)
        number = ranks * num_tokens + token
        came = tl.load(visits + number, mask=ranks < RANKS, other=0) != 0
        found = tl.load(x + number * HIDDEN + column, mask=came & inside, other=0.0)
        bits = sent(found.to(tl.int16, bitcast=True), EMPTY_VALUE)
        slot = start + (item // programs * RANKS + rank) * BLOCK + lanes
        tl.store(receivers + slot, bits, mask=(came | (lanes < VALUES_PER_VECTOR)) & inside)
    for item in range(channel, num_tokens * BLOCKS, programs):
        token, column = item // BLOCKS, item % BLOCKS * BLOCK + lanes
        inside = (ranks < RANKS) & (column < HIDDEN)
        went = tl.load(visits + (RANKS + ranks) * num_tokens + token, mask=ranks < RANKS, other=0) != 0
        slots = start + (item // programs * RANKS + ranks) * BLOCK + lanes
        came = receive(own + slots, (went | (lanes < VALUES_PER_VECTOR)) & inside, EMPTY_VALUE, ended, BLOCK)
        tl.store(total + token * HIDDEN + column, sum_of(came, x.dtype.element_ty), mask=column < HIDDEN)
    end(turns, channel, turn)


@triton.jit
def _local(words, is_id, first, num_places):
    """Convert places to indices from `first`; places outside, and words that are not ids, become -1."""
    place = words - first
    return tl.where(is_id & (place >= 0) & (place < num_places), place, -1)

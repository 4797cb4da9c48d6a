"""Truncation thresholds: the least logit of each row that min-p, top-k and top-p keep. One program per row.

A row does not fit in registers, and sorting it is slow, but the threshold is nearly always among the best few logits.
So in one pass over the row, each lane keeps the three best logits that it sees:

    logits    l0 l1 l2 ... l2047 | l2048 ...          lane j sees l[j], l[j + 2048], ...
    lanes     first >= second >= third, each [2048]   dropped logits are at most the lane's third

So every logit above `blind`, the maximum of the thirds, is in the lanes. Top-k and top-p both need the greatest logit x
for which the weights of all logits >= x reach a goal (top-k: each weight is 1, and the goal is k). If the logits in the
lanes reach the goal at `blind` or above, x is found by bisection over floats, without memory access. Otherwise (for
flat rows and large k) x is lower, and passes over the row narrow it down.

Programs of rows without truncation exit at once. Sums of weights are float32 within a lane, and float64 between lanes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl

from ..batch import GREEDY_BELOW, MIN_P, ROW_WORDS, TEMPERATURE, TOP_K, TOP_P
from .draw import SCOREBOARD_WORDS
from .numerics import ordered, portable_log, unordered

_ROW_WORDS = tl.constexpr(ROW_WORDS)
_TEMPERATURE, _TOP_K = tl.constexpr(TEMPERATURE), tl.constexpr(TOP_K)
_TOP_P, _MIN_P = tl.constexpr(TOP_P), tl.constexpr(MIN_P)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NONE = tl.constexpr(-math.inf)
_INFINITE = tl.constexpr(math.inf)
_LOG2_E = tl.constexpr(math.log2(math.e))

LANES = 2048
NUM_WARPS = 16
_AT_ONCE = tl.constexpr(4)  # concurrent loads
_ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # trailing zero bits of logits as float32


def truncate(logits: Tensor, table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least logit [R] float32 that each row may draw (-inf without truncation), and `scoreboards`.

    The scoreboards are for one call of `draw_tokens`.
    """
    num_rows, vocab_size = logits.shape
    floors = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    scoreboards = torch.empty(num_rows, SCOREBOARD_WORDS, dtype=torch.int32, device=logits.device)
    if num_rows:
        truncate_kernel[(num_rows,)](
            logits,
            table,
            rows,
            floors,
            scoreboards,
            vocab_size,
            logits.stride(0),
            ZERO_BITS=_ZERO_BITS[logits.dtype],
            LANES=LANES,
            SCOREBOARD_WORDS=SCOREBOARD_WORDS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **pdl.launch_options(),
        )
    return floors, scoreboards


@triton.jit
def truncate_kernel(
    logits_ptr,  # [R, V]
    table_ptr,  # [num_rows, ROW_WORDS] int32
    rows_ptr,  # [R]
    floors_ptr,  # [R] float32
    scoreboards_ptr,  # [R, SCOREBOARD_WORDS] int32
    vocab_size,
    logits_stride,
    ZERO_BITS: tl.constexpr,
    LANES: tl.constexpr,
    SCOREBOARD_WORDS: tl.constexpr,
):
    pdl.let_next_start()
    pdl.wait_for_previous()
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index).to(tl.int64)
    floor = tl.full([], _NONE, tl.float32)
    tl.store(scoreboards_ptr + index * SCOREBOARD_WORDS, ordered(floor))
    tl.store(scoreboards_ptr + index * SCOREBOARD_WORDS + 1, 0)
    if row >= 0:
        words = table_ptr + row * _ROW_WORDS
        temperature = tl.load(words + _TEMPERATURE).to(tl.float32, bitcast=True)
        top_k = tl.load(words + _TOP_K)
        top_p = tl.load(words + _TOP_P).to(tl.float32, bitcast=True)
        min_p = tl.load(words + _MIN_P).to(tl.float32, bitcast=True)
        truncates = ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)
        if truncates & (temperature >= _GREEDY_BELOW):
            logits = logits_ptr + index.to(tl.int64) * logits_stride
            floor = _floor(logits, vocab_size, temperature, top_k, top_p, min_p, ZERO_BITS, LANES)
    tl.store(floors_ptr + index, floor)


@triton.jit
def _floor(logits, vocab_size, temperature, top_k, top_p, min_p, ZERO_BITS: tl.constexpr, LANES: tl.constexpr):
    first, second, third = _best_of_lanes(logits, vocab_size, LANES)
    best = tl.max(first)
    floor = tl.full([], _NONE, tl.float32)
    if best == _INFINITE:
        floor = best
    elif best > _NONE:
        if min_p > 0:
            # `portable_log` needs normal numbers; every float32 is a normal float64.
            floor = _round_up(best.to(tl.float64) + temperature.to(tl.float64) * portable_log(min_p.to(tl.float64)))
        for question in range(2):  # top-k, then top-p over the rest; a loop, so that the code is compiled once
            by_count = question == 0
            if tl.where(by_count, (top_k > 0) & (top_k < vocab_size), top_p < 1):
                decay = tl.where(by_count, 0.0, 1 / temperature * _LOG2_E)
                weigh_from = tl.where(by_count, _NONE, floor)
                goal, least = top_k.to(tl.float64), tl.full([], _NONE, tl.float32)
                if not by_count:
                    if floor > tl.max(third):
                        mass = _sum(
                            _weight(first, best, decay, floor)
                            + _weight(second, best, decay, floor)
                            + _weight(third, best, decay, floor)
                        )
                    else:
                        mass, _, _ = _pass(logits, vocab_size, best, decay, floor, floor, LANES)
                    goal = top_p.to(tl.float64) * mass
                    # All logits below this together weigh less than top-p may drop: the best alone weighs 1.
                    least = best - (tl.log2(vocab_size / (1 - top_p)) + 1) / decay
                end = _quantile(
                    logits, vocab_size, first, second, third, decay, weigh_from, least, goal, ZERO_BITS, LANES
                )
                floor = tl.maximum(floor, end)
    return floor


@triton.jit
def _best_of_lanes(logits, vocab_size, LANES: tl.constexpr):
    """Return the three best logits `[LANES]` that each lane sees, best first."""
    lane = tl.arange(0, LANES)
    first = tl.full([LANES], _NONE, tl.float32)
    second, third = first, first
    for start in range(0, vocab_size, LANES * _AT_ONCE):
        x0, x1, x2, x3 = _load_four(logits, start + lane, vocab_size, LANES)
        first, second, third = _keep_best(first, second, third, x0)
        first, second, third = _keep_best(first, second, third, x1)
        first, second, third = _keep_best(first, second, third, x2)
        first, second, third = _keep_best(first, second, third, x3)
    return first, second, third


@triton.jit
def _keep_best(first, second, third, logit):
    third = tl.maximum(third, tl.minimum(second, logit))
    second = tl.maximum(second, tl.minimum(first, logit))
    return tl.maximum(first, logit), second, third


@triton.jit
def _quantile(
    logits,
    vocab_size,
    first,
    second,
    third,
    decay,  # a logit weighs 2**((logit - best) * decay)
    floor,  # lower logits have weight 0
    least,  # a logit at which the goal is certainly reached
    goal,
    ZERO_BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return the greatest x for which the weights of all logits >= x reach `goal`; at most `least` if none does."""
    best, blind = tl.max(first), tl.max(third)
    w0 = _weight(first, best, decay, floor)
    w1 = _weight(second, best, decay, floor)
    w2 = _weight(third, best, decay, floor)
    seen = _sum(_from(first, w0, blind) + _from(second, w1, blind) + _from(third, w2, blind)) >= goal
    least = tl.maximum(least, floor)
    low, high = _key(tl.where(seen, blind, least), ZERO_BITS), _key(tl.where(seen, best, blind), ZERO_BITS) + 1
    # Below `blind` the lanes have only some of the logits, so a result there may be too low, but not too high.
    while high - low > 1:
        middle = low + (high - low) // 2
        at = _logit(middle, ZERO_BITS)
        if _sum(_from(first, w0, at) + _from(second, w1, at) + _from(third, w2, at)) >= goal:
            low = middle
        else:
            high = middle
    if not seen:
        low = _narrow(logits, vocab_size, best, blind, decay, floor, low, goal, ZERO_BITS, LANES)
    return _logit(low, ZERO_BITS)


@triton.jit
def _narrow(logits, vocab_size, best, blind, decay, floor, low, goal, ZERO_BITS: tl.constexpr, LANES: tl.constexpr):
    """Return the key of the quantile, from `low` up to that of `blind`, by passes over the row."""
    high = _key(blind, ZERO_BITS) + 1
    low_mass, high_mass = 2 * goal, 0 * goal  # a guess: it only affects where the first passes look
    turn = 0
    while high - low > 1:
        middle = low + (high - low) // 2
        low_logit, high_logit = _logit(low, ZERO_BITS), _logit(high, ZERO_BITS)
        if (turn % 2 == 0) & (low_logit > _NONE):
            # Interpolates linearly for the goal. Every other iteration bisects, in case the mass is distributed
            # unevenly.
            share = ((low_mass - goal) / (low_mass - high_mass)).to(tl.float32)
            middle = _key(low_logit + (high_logit - low_logit) * share, ZERO_BITS)
            middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        mass, above, below = _pass(logits, vocab_size, best, decay, floor, _logit(middle, ZERO_BITS), LANES)
        # No logit lies between `below` and `above`, so the search continues outside of them.
        if mass >= goal:
            low, low_mass = tl.maximum(middle, _key(above, ZERO_BITS)), mass
        else:
            high, high_mass = tl.minimum(middle, _key(below, ZERO_BITS) + 1), mass
        turn += 1
    return low


@triton.jit
def _pass(logits, vocab_size, best, decay, floor, at, LANES: tl.constexpr):
    """Return the weight of the logits >= `at` and >= `floor`, the least logit >= `at`, and the greatest below it."""
    lane = tl.arange(0, LANES)
    weight = tl.zeros([LANES], tl.float32)
    above = tl.full([LANES], _INFINITE, tl.float32)
    below = tl.full([LANES], _NONE, tl.float32)
    least = tl.maximum(at, floor)
    for start in range(0, vocab_size, LANES * _AT_ONCE):
        x0, x1, x2, x3 = _load_four(logits, start + lane, vocab_size, LANES)
        weight += _weight(x0, best, decay, least) + _weight(x1, best, decay, least)
        weight += _weight(x2, best, decay, least) + _weight(x3, best, decay, least)
        above = tl.minimum(tl.minimum(above, _upper(x0, at)), tl.minimum(_upper(x1, at), _upper(x2, at)))
        above = tl.minimum(above, _upper(x3, at))
        below = tl.maximum(tl.maximum(below, _lower(x0, at)), tl.maximum(_lower(x1, at), _lower(x2, at)))
        below = tl.maximum(below, _lower(x3, at))
    return _sum(weight), tl.min(above), tl.max(below)


@triton.jit
def _upper(logit, at):
    return tl.where(logit >= at, logit, _INFINITE)


@triton.jit
def _lower(logit, at):
    return tl.where(logit < at, logit, _NONE)


@triton.jit
def _load_four(logits, token, vocab_size, LANES: tl.constexpr):
    """Return the next four logits of each lane as float32; -inf for NaN and past the vocabulary."""
    y0 = tl.load(logits + token, token < vocab_size, _NONE)
    y1 = tl.load(logits + token + LANES, token + LANES < vocab_size, _NONE)
    y2 = tl.load(logits + token + 2 * LANES, token + 2 * LANES < vocab_size, _NONE)
    y3 = tl.load(logits + token + 3 * LANES, token + 3 * LANES < vocab_size, _NONE)
    return _number(y0), _number(y1), _number(y2), _number(y3)


@triton.jit
def _number(logit):
    return tl.maximum(logit.to(tl.float32), _NONE)


@triton.jit
def _weight(logit, best, decay, floor):
    return tl.where((logit >= floor) & (logit > _NONE), tl.exp2((logit - best) * decay), 0.0)


@triton.jit
def _from(logit, weight, at):
    return tl.where(logit >= at, weight, 0.0)


@triton.jit
def _sum(weight):
    """Return the sum `[]` float64 of `[LANES]` float32."""
    threads = tl.reshape(weight, [weight.shape[0] // 4, 4])
    return tl.sum(tl.sum(threads, 1).to(tl.float64))


@triton.jit
def _key(logit, ZERO_BITS: tl.constexpr):
    """Return an int64 key of a float, in the order of floats; adjacent for floats with ZERO_BITS trailing zeros."""
    return (ordered(logit) >> ZERO_BITS).to(tl.int64)


@triton.jit
def _logit(key, ZERO_BITS: tl.constexpr):
    """Return the float of a key."""
    # The keys of negative floats have inverted bits, so the trailing ones must be ones.
    return unordered((key << ZERO_BITS).to(tl.int32) | tl.where(key < 0, (1 << ZERO_BITS) - 1, 0))


@triton.jit
def _round_up(x):
    """Return the smallest float32 that is not below a float64."""
    near = x.to(tl.float32)
    bits = near.to(tl.int32, bitcast=True)
    above = tl.where(bits >= 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)
    return tl.where(near.to(tl.float64) < x, above, near)

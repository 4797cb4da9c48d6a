"""One pass over the logits: each program finds the winner of its share of a row, and the last one to end chooses.

A token's score is logit / temperature + noise, in float64 (greedy rows: the logit). Nearly all tokens lose whatever
their logarithms are, so a tile of tokens passes through sieves of growing cost, each of which only drops tokens that
are below the best score so far by more than all that it may have rounded:

    1  best logit of the tile            with the greatest noise that there is: needs no random words
    2  v <= exp(logit / T - best)        noise = -log(-log u) <= -log v with v = 1 - u: for the best logit and the
                                         luckiest word of the four tokens that share a counter
    3  logit / T - log v                 computed for the tile, greatest first
    4  the score itself                  token by token, until sieve 3 says that the rest is below

Sieves decide how much is computed, never which token wins. So the programs of a row may tell each other at any time
what they have reached. They meet in a cache line of their own, which holds that and how many of them have ended:

    meetings[row]    goal, the best score less the margin, as an integer in the order of floats | arrived | unused
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import tuned

from .. import row_words
from ..batch import GREEDY_BELOW
from .floats import ordered, unordered
from .noise import GREATEST_NOISE, GROUP, LANES, gumbel, philox, word_of

_ROW_WORDS = tl.constexpr(row_words.ROW_WORDS)
_TEMPERATURE = tl.constexpr(row_words.TEMPERATURE)
_SEED_LOW, _SEED_HIGH = tl.constexpr(row_words.SEED_LOW), tl.constexpr(row_words.SEED_HIGH)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NONE = tl.constexpr(-math.inf)
_LOG2_E = tl.constexpr(math.log2(math.e))
_LOG_2 = tl.constexpr(math.log(2))
_MARGIN = tl.constexpr(1e-3)  # more than float32 rounds in sieves 2 and 3, where logits are not much larger than T ...
_RELATIVE_MARGIN = tl.constexpr(1e-6)  # ... and in sieves 1 and 2 where they are
_MOST_SHARES = 512  # of a row
MEETING_WORDS = 32
_MEETING_WORDS = tl.constexpr(MEETING_WORDS)

OPTIONS = {"groups": 8, "num_warps": 1, "programs": 2112}


def draw_tokens(
    logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor, floors: Tensor, meetings: Tensor
) -> Tensor:
    """Token ids `[R]` int64 of the rows; only logits from `floors` `[R]` float32 upwards can be drawn.

    `meetings` `[R, MEETING_WORDS]` int32 must be as `truncate` leaves them: nothing reached, nobody arrived.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    options = tuned.config("sampling", logits.device, {"kernel": "draw", "rows": num_rows}, OPTIONS)
    tiles = -(-vocab_size // (options["groups"] * GROUP.value))
    shares = max(1, min(tiles, options["programs"] // num_rows, _MOST_SHARES))
    scores = torch.empty(num_rows, shares, dtype=torch.float64, device=logits.device)
    winners = torch.empty(num_rows, shares, dtype=torch.int32, device=logits.device)
    _draw_share[(shares, num_rows)](
        logits,
        table,
        rows,
        positions,
        floors,
        meetings,
        scores,
        winners,
        tokens,
        vocab_size,
        logits.stride(0),
        GROUPS=options["groups"],
        MOST_SHARES=_MOST_SHARES,
        num_warps=options["num_warps"],
        enable_fp_fusion=False,
    )
    return tokens


@triton.jit
def _draw_share(
    logits_ptr,  # [R, V]
    table_ptr,  # [num_rows, ROW_WORDS] int32
    rows_ptr,  # [R]
    positions_ptr,  # [R]
    floors_ptr,  # [R] float32
    meetings_ptr,  # [R, MEETING_WORDS] int32
    scores_ptr,  # [R, shares] float64
    winners_ptr,  # [R, shares] int32
    tokens_ptr,  # [R] int64
    vocab_size,
    logits_stride,
    GROUPS: tl.constexpr,  # of 64 tokens, in a tile
    MOST_SHARES: tl.constexpr,
):
    share, index = tl.program_id(0), tl.program_id(1)
    group = tl.arange(0, GROUPS)[:, None]
    first = share * GROUPS * GROUP + group * GROUP + tl.arange(0, LANES)[None, :]
    logits = logits_ptr + index.to(tl.int64) * logits_stride
    y0, y1, y2, y3 = _load_group(logits, first, vocab_size)  # under way while the row's numbers come
    row = tl.load(rows_ptr + index).to(tl.int64)
    meeting = meetings_ptr + index * _MEETING_WORDS
    best = tl.full([], _NONE, tl.float64)
    winner = tl.full([], 0, tl.int32)
    if row >= 0:
        words = table_ptr + row * _ROW_WORDS
        temperature = tl.load(words + _TEMPERATURE).to(tl.float32, bitcast=True)
        if temperature < _GREEDY_BELOW:
            best, winner = _best_logit(logits, vocab_size, first, y0, y1, y2, y3)
        else:
            seed = tl.load(words + _SEED_HIGH).to(tl.int64) << 32 | tl.load(words + _SEED_LOW).to(tl.uint32).to(
                tl.int64
            )
            position = tl.load(positions_ptr + index).to(tl.int64)
            floor = tl.load(floors_ptr + index)
            best, winner = _best_score(
                logits, vocab_size, first, y0, y1, y2, y3, temperature, floor, position, seed, meeting
            )
    shares = tl.num_programs(0)
    tl.store(scores_ptr + index * shares + share, best)
    tl.store(winners_ptr + index * shares + share, winner)
    if tl.atomic_add(meeting + 1, 1, sem="acq_rel") == shares - 1:
        slot = tl.arange(0, MOST_SHARES)
        score = tl.load(scores_ptr + index * shares + slot, slot < shares, _NONE, cache_modifier=".cg")
        theirs = tl.load(winners_ptr + index * shares + slot, slot < shares, 0, cache_modifier=".cg")
        token = tl.min(tl.where(score == tl.max(score), theirs, vocab_size))
        tl.store(tokens_ptr + index, tl.where(row >= 0, token, 0).to(tl.int64))


@triton.jit
def _best_logit(logits, vocab_size, first, y0, y1, y2, y3):
    """The greatest logit of this program's tiles, and the first token that has it."""
    TILE: tl.constexpr = first.shape[0] * GROUP
    best = tl.full([], _NONE, tl.float32)
    winner = tl.full([], 0, tl.int32)
    step = tl.num_programs(0) * TILE
    for _ in range(tl.program_id(0) * TILE, vocab_size, step):
        x0, x1, x2, x3 = y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32)
        y0, y1, y2, y3 = _load_group(logits, first + step, vocab_size)
        greatest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        if _any(greatest > best):
            best = tl.max(greatest)
            winner = _first_of(x0 == best, x1 == best, x2 == best, x3 == best, first, vocab_size)
        first += step
    return best.to(tl.float64), winner


@triton.jit
def _best_score(logits, vocab_size, first, y0, y1, y2, y3, temperature, floor, position, seed, meeting):
    """The greatest score of this program's tiles, and the first token that has it."""
    TILE: tl.constexpr = first.shape[0] * GROUP
    scale = 1 / temperature
    best = tl.full([], _NONE, tl.float64)
    winner = tl.full([], 0, tl.int32)
    goal = tl.full([], _NONE, tl.float32)
    reached = _reached(meeting)
    step = tl.num_programs(0) * TILE
    for _ in range(tl.program_id(0) * TILE, vocab_size, step):
        x0, x1, x2, x3 = y0.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32), y3.to(tl.float32)
        y0, y1, y2, y3 = _load_group(logits, first + step, vocab_size)
        goal = tl.maximum(goal, unordered(reached))
        reached = _reached(meeting)
        least = tl.maximum(floor, (goal - GREATEST_NOISE) * temperature)
        greatest = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        if _any((greatest > _NONE) & (greatest >= least)):
            counter = first // GROUP * LANES + first % GROUP
            w0, w1, w2, w3 = philox(counter.to(tl.uint32), position, seed)
            luckiest = tl.maximum(tl.maximum(w0, w1), tl.maximum(w2, w3))
            if _any(_hopeful(greatest, luckiest, scale * _LOG2_E, 23 - goal * _LOG2_E)):
                top = tl.max(greatest)
                base = top.to(tl.float64) / temperature.to(tl.float64)
                b0 = _bound(x0, w0, top, scale, floor)
                b1 = _bound(x1, w1, top, scale, floor)
                b2 = _bound(x2, w2, top, scale, floor)
                b3 = _bound(x3, w3, top, scale, floor)
                lead = tl.max(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)))
                # Of several infinite scores the first token wins: what is not a number goes on, too.
                while (lead > _NONE) & ~(
                    lead < (tl.maximum(best, goal.to(tl.float64)) - base).to(tl.float32) - _MARGIN
                ):
                    token = _first_of(b0 == lead, b1 == lead, b2 == lead, b3 == lead, first, vocab_size)
                    logit = tl.load(logits + token).to(tl.float64)
                    score = logit / temperature.to(tl.float64) + gumbel(word_of(token, position, seed))
                    better = (score > best) | ((score == best) & (token < winner))
                    best = tl.where(better, score, best)
                    winner = tl.where(better, token, winner)
                    b0 = tl.where(first == token, _NONE, b0)
                    b1 = tl.where(first + LANES == token, _NONE, b1)
                    b2 = tl.where(first + 2 * LANES == token, _NONE, b2)
                    b3 = tl.where(first + 3 * LANES == token, _NONE, b3)
                    lead = tl.max(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)))
                improved = (best - _MARGIN - _RELATIVE_MARGIN * tl.abs(best)).to(tl.float32)
                if improved > goal:
                    goal = improved
                    tl.atomic_max(meeting, ordered(goal), sem="relaxed")
        first += step
    return best, winner


@triton.jit
def _reached(meeting):
    """What the programs of the row have told so far: the same for all threads, whenever each of them looks."""
    return tl.max(tl.load(meeting + tl.zeros([32], tl.int32), volatile=True))


@triton.jit
def _load_group(logits, first, vocab_size):
    """The logits of the four tokens that share a counter; minus infinity for tokens that there are not."""
    x0 = tl.load(logits + first, first < vocab_size, _NONE)
    x1 = tl.load(logits + first + LANES, first + LANES < vocab_size, _NONE)
    x2 = tl.load(logits + first + 2 * LANES, first + 2 * LANES < vocab_size, _NONE)
    x3 = tl.load(logits + first + 3 * LANES, first + 3 * LANES < vocab_size, _NONE)
    return x0, x1, x2, x3


@triton.jit
def _first_of(is0, is1, is2, is3, first, vocab_size):
    """The lowest of the tile's tokens that are meant."""
    token = tl.where(is0, first, vocab_size)
    token = tl.minimum(token, tl.where(is1, first + LANES, vocab_size))
    token = tl.minimum(token, tl.where(is2, first + 2 * LANES, vocab_size))
    return tl.min(tl.minimum(token, tl.where(is3, first + 3 * LANES, vocab_size)))


@triton.jit
def _any(condition):
    return tl.max(condition.to(tl.int32)) > 0


@triton.jit
def _hopeful(logit, word, slope, offset):
    """Sieve 2: whether 2**23 v, rounded down, is at most 2**(slope * logit + offset). What is not a number passes."""
    # The bits of 2**23 + k are those of 2**23, plus k: a conversion without the slow unit for conversions.
    v = ((word >> 9) ^ 0x4B7FFFFF).to(tl.float32, bitcast=True) - 8388608.0
    return ~(v > tl.exp2(tl.fma(logit, slope, offset)))


@triton.jit
def _bound(logit, word, top, scale, floor):
    """Sieve 3: at least the score, but for rounding, less `top` / temperature; minus infinity for what is truncated."""
    v = ((~word).to(tl.float32) + 0.5) * (2.0**-32)
    # Read as a fixed-point number, the bits of a float are its logarithm with base 2, or a little less.
    log2_v = v.to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-23) - 127
    behind = tl.where(logit == top, 0.0, (logit - top) * scale)
    return tl.where(logit >= floor, behind - log2_v * _LOG_2, _NONE)

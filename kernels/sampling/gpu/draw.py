"""Sampling in one pass over the logits: each program finds the best token of its part of a row, and the last program to
arrive chooses among them.

A token's score is logit / temperature + noise, in float64 (greedy rows: the logit). For nearly all tokens, a cheap
upper bound of the score shows that they lose. So a tile of tokens passes through sieves of growing cost. Each sieve
drops only tokens whose bound is below the best score so far by more than its rounding error:

    1  best logit of the tile            plus the greatest possible noise: needs no random words
    2  v <= exp(logit / T - best)        noise = -log(-log u) <= -log v with v = 1 - u: for the best logit and the
                                         luckiest word of the four tokens that share a counter, in whole steps of 2**-23
    3  logit / T - log v                 computed for the tile, greatest first
    4  the score itself                  token by token, until sieve 3 shows that the rest is lower

Sieves affect only how much is computed, never which token wins. So the programs of a row may exchange their best scores
at any time. They share a cache line with the best score and the number of programs that have finished:

    scoreboards[row]    goal (the best score less the margin, as an integer in the order of floats) | arrived | unused
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels import pdl

from ..batch import GREEDY_BELOW, NO_TOKEN, ROW_WORDS, SEED_HIGH, SEED_LOW, TEMPERATURE
from .numerics import GREATEST_NOISE, GROUP, LANES, gumbel, ordered, philox, unordered, word_of

_ROW_WORDS = tl.constexpr(ROW_WORDS)
_TEMPERATURE = tl.constexpr(TEMPERATURE)
_SEED_LOW, _SEED_HIGH = tl.constexpr(SEED_LOW), tl.constexpr(SEED_HIGH)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_NONE = tl.constexpr(-math.inf)
_LEAST = tl.constexpr(-float(torch.finfo(torch.float32).max))
_LOG2_E = tl.constexpr(math.log2(math.e))
_LOG_2 = tl.constexpr(math.log(2))
_MARGIN = tl.constexpr(1e-3)  # above the float32 rounding error of sieves 2 and 3, if logits are not much larger than T
_RELATIVE_MARGIN = tl.constexpr(1e-6)  # ... and of sieves 1 and 2, if they are
_CERTAIN = tl.constexpr(0x4B7FFFFF)
MOST_SHARES = 512  # most programs of a row
SCOREBOARD_WORDS = 32
_SCOREBOARD_WORDS = tl.constexpr(SCOREBOARD_WORDS)

OPTIONS = {"groups": 8, "programs": 2112}
NUM_WARPS = 1  # two warps might see different goals, and would diverge


def draw_tokens(
    logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor, floors: Tensor, scoreboards: Tensor
) -> Tensor:
    """Draw token ids [R] int64, or `NO_TOKEN`, among the tokens with logits of at least `floors` [R] float32.

    `scoreboards` [R, SCOREBOARD_WORDS] int32 must be in the state in which `truncate` returns them.
    """
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    tiles = -(-vocab_size // (OPTIONS["groups"] * GROUP.value))
    shares = max(1, min(tiles, OPTIONS["programs"] // num_rows, MOST_SHARES))
    scores = torch.empty(num_rows, shares, dtype=torch.float64, device=logits.device)
    winners = torch.empty(num_rows, shares, dtype=torch.int32, device=logits.device)
    draw_share_kernel[(shares, num_rows)](
        logits,
        table,
        rows,
        positions,
        floors,
        scoreboards,
        scores,
        winners,
        tokens,
        vocab_size,
        logits.stride(0),
        GROUPS=OPTIONS["groups"],
        MOST_SHARES=MOST_SHARES,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **pdl.launch_options(),
    )
    return tokens


@triton.jit
def draw_share_kernel(
    logits_ptr,  # [R, V]
    table_ptr,  # [num_rows, ROW_WORDS] int32
    rows_ptr,  # [R]
    positions_ptr,  # [R]
    floors_ptr,  # [R] float32
    scoreboards_ptr,  # [R, SCOREBOARD_WORDS] int32
    scores_ptr,  # [R, shares] float64
    winners_ptr,  # [R, shares] int32
    tokens_ptr,  # [R] int64
    vocab_size,
    logits_stride,
    GROUPS: tl.constexpr,  # of 64 tokens, in a tile
    MOST_SHARES: tl.constexpr,
):
    pdl.let_next_start()
    pdl.wait_for_previous()
    share, index = tl.program_id(0), tl.program_id(1)
    logits = logits_ptr + index.to(tl.int64) * logits_stride
    # Two tiles are being loaded at any time; the first loads start before the row's numbers have arrived.
    start, step = share * GROUPS * GROUP, tl.num_programs(0) * GROUPS * GROUP
    tile = _load_tile(logits, start, vocab_size, GROUPS)
    following = _load_tile(logits, start + step, vocab_size, GROUPS)
    row = tl.load(rows_ptr + index).to(tl.int64)
    scoreboard = scoreboards_ptr + index * _SCOREBOARD_WORDS
    best = tl.full([], _NONE, tl.float64)
    winner = tl.full([], 0, tl.int32)
    if row >= 0:
        words = table_ptr + row * _ROW_WORDS
        temperature = tl.load(words + _TEMPERATURE).to(tl.float32, bitcast=True)
        if temperature < _GREEDY_BELOW:
            best, winner = _best_logit(logits, vocab_size, tile, following, GROUPS)
        else:
            seed = tl.load(words + _SEED_HIGH).to(tl.int64) << 32 | tl.load(words + _SEED_LOW).to(tl.uint32).to(
                tl.int64
            )
            position = tl.load(positions_ptr + index).to(tl.int64)
            floor = tl.load(floors_ptr + index)
            best, winner = _best_score(
                logits,
                vocab_size,
                tile,
                following,
                temperature,
                floor,
                position,
                seed,
                scoreboard,
                GROUPS,
            )
    shares = tl.num_programs(0)
    tl.store(scores_ptr + index * shares + share, best)
    tl.store(winners_ptr + index * shares + share, winner)
    if tl.atomic_add(scoreboard + 1, 1, sem="acq_rel") == shares - 1:
        slot = tl.arange(0, MOST_SHARES)
        score = tl.load(scores_ptr + index * shares + slot, slot < shares, _NONE, cache_modifier=".cg")
        theirs = tl.load(winners_ptr + index * shares + slot, slot < shares, 0, cache_modifier=".cg")
        reached = tl.max(score)
        token = tl.where(reached > _NONE, tl.min(tl.where(score == reached, theirs, vocab_size)), _NO_TOKEN)
        tl.store(tokens_ptr + index, tl.where(row >= 0, token, 0).to(tl.int64))


@triton.jit
def _best_logit(logits, vocab_size, tile, following, GROUPS: tl.constexpr):
    """Return the greatest logit of this program's tiles, and the first token that has it."""
    best = tl.full([], _NONE, tl.float32)
    winner = tl.full([], 0, tl.int32)
    step = tl.num_programs(0) * GROUPS * GROUP
    for start in range(tl.program_id(0) * GROUPS * GROUP, vocab_size, step):
        x0, x1, x2, x3 = _known(tile, start, vocab_size, GROUPS)
        tile = following
        following = _load_tile(logits, start + 2 * step, vocab_size, GROUPS)
        greatest = _by_thread(_greater(_greater(x0, x1), _greater(x2, x3)).to(tl.float32))
        if _any(greatest > best):
            best = tl.max(greatest)
            is0, is1 = x0.to(tl.float32) == best, x1.to(tl.float32) == best
            is2, is3 = x2.to(tl.float32) == best, x3.to(tl.float32) == best
            winner = _first_of(is0, is1, is2, is3, start, vocab_size)
    return best.to(tl.float64), winner


@triton.jit
def _best_score(
    logits,
    vocab_size,
    tile,
    following,
    temperature,
    floor,
    position,
    seed,
    scoreboard,
    GROUPS: tl.constexpr,
):
    """Return the greatest score of this program's tiles, and the first token that has it."""
    scale = 1 / temperature
    best = tl.full([], _NONE, tl.float64)
    winner = tl.full([], 0, tl.int32)
    goal = tl.full([], _NONE, tl.float32)
    reached = _reached(scoreboard)
    step = tl.num_programs(0) * GROUPS * GROUP
    for start in range(tl.program_id(0) * GROUPS * GROUP, vocab_size, step):
        x0, x1, x2, x3 = _known(tile, start, vocab_size, GROUPS)
        tile = following
        following = _load_tile(logits, start + 2 * step, vocab_size, GROUPS)
        goal = tl.maximum(goal, unordered(reached))
        reached = _reached(scoreboard)
        least = tl.maximum(tl.maximum(floor, (goal - GREATEST_NOISE) * temperature), _LEAST)
        greatest = _greater(_greater(x0, x1), _greater(x2, x3)).to(tl.float32)
        if _any(_by_thread(greatest) >= least):
            counter = start // (GROUP // LANES) + _lane(GROUPS)
            w0, w1, w2, w3 = philox(counter.to(tl.uint32), position, seed)
            luckiest = tl.maximum(tl.maximum(w0, w1), tl.maximum(w2, w3))
            if tl.max(_by_thread(_chance(greatest, luckiest, scale * _LOG2_E, 23 - goal * _LOG2_E))) >= _CERTAIN:
                first = start + _offset(GROUPS)
                top = tl.max(greatest)
                base = top.to(tl.float64) / temperature.to(tl.float64)
                b0 = _bound(x0.to(tl.float32), w0, top, scale, floor)
                b1 = _bound(x1.to(tl.float32), w1, top, scale, floor)
                b2 = _bound(x2.to(tl.float32), w2, top, scale, floor)
                b3 = _bound(x3.to(tl.float32), w3, top, scale, floor)
                lead = tl.max(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)))
                # Among several infinite scores the first token wins, so NaN must continue, too.
                while (lead > _NONE) & ~(
                    lead < (tl.maximum(best, goal.to(tl.float64)) - base).to(tl.float32) - _MARGIN
                ):
                    token = _first_of(b0 == lead, b1 == lead, b2 == lead, b3 == lead, start, vocab_size)
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
                    tl.atomic_max(scoreboard, ordered(goal), sem="relaxed")
    return best, winner


@triton.jit
def _reached(scoreboard):
    """Return the best score that the row's programs have published so far: the same for all threads of a program."""
    return tl.max(tl.load(scoreboard + tl.zeros([32], tl.int32), volatile=True))


@triton.jit
def _lane(GROUPS: tl.constexpr):
    """Return the numbers of a tile's counters, `[GROUPS, LANES]`."""
    return tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _offset(GROUPS: tl.constexpr):
    """Return the offset in the tile of each counter's first token, [GROUPS, LANES]; its others follow LANES apart."""
    return tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, LANES)[None, :]


@triton.jit
def _load_tile(logits, start, vocab_size, GROUPS: tl.constexpr):
    """Return the logits of the four tokens of each counter of a tile; undefined past the vocabulary."""
    offset = _offset(GROUPS)
    left = vocab_size - start
    at = logits + start + offset
    x0 = tl.load(at, offset < left)
    x1 = tl.load(at + LANES, offset + LANES < left)
    x2 = tl.load(at + 2 * LANES, offset + 2 * LANES < left)
    x3 = tl.load(at + 3 * LANES, offset + 3 * LANES < left)
    return x0, x1, x2, x3


@triton.jit
def _known(tile, start, vocab_size, GROUPS: tl.constexpr):
    """Return a tile with -inf for tokens past the vocabulary."""
    x0, x1, x2, x3 = tile
    left = vocab_size - start
    if left < GROUPS * GROUP:
        offset = _offset(GROUPS)
        none = tl.full(x0.shape, _NONE, x0.dtype)
        x0 = tl.where(offset < left, x0, none)
        x1 = tl.where(offset + LANES < left, x1, none)
        x2 = tl.where(offset + 2 * LANES < left, x2, none)
        x3 = tl.where(offset + 3 * LANES < left, x3, none)
    return x0, x1, x2, x3


@triton.jit
def _first_of(is0, is1, is2, is3, start, vocab_size):
    """Return the lowest of the tile's tokens for which a condition holds."""
    first = start + _offset(is0.shape[0])
    token = tl.where(is0, first, vocab_size)
    token = tl.minimum(token, tl.where(is1, first + LANES, vocab_size))
    token = tl.minimum(token, tl.where(is2, first + 2 * LANES, vocab_size))
    return tl.min(tl.minimum(token, tl.where(is3, first + 3 * LANES, vocab_size)))


@triton.jit
def _any(condition):
    return tl.max(condition.to(tl.int32)) > 0


@triton.jit
def _by_thread(values):
    """Return the greatest of the four lanes of each thread, so that the next steps handle a quarter of the values."""
    return tl.max(tl.reshape(values, [values.shape[0] * values.shape[1] // 4, 4]), 1)


@triton.jit
def _greater(one, other):
    """Return the greater of two logits, or the one that is not NaN."""
    if one.dtype == tl.bfloat16:
        # Triton itself would convert the pairs to float32, and compare those.
        greater = tl.inline_asm_elementwise(
            "max.bf16x2 $0, $1, $2;", "=r,r,r", [one, other], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        greater = tl.maximum(one, other)
    return greater


@triton.jit
def _chance(logit, word, slope, offset):
    """Compute sieve 2: at least `_CERTAIN` if floor(2**23 v) is at most 2**(slope * logit + offset), rounded.

    NaN passes.
    """
    # As floats, the bits of 2**23 + n are those of 2**23, plus n. And 2**23 v = 2**23 - 1 - (word >> 9). So this is
    # integer arithmetic.
    most = (tl.exp2(tl.fma(logit, slope, offset)) + 8388608.0).to(tl.uint32, bitcast=True)
    return most + (word >> 9)


@triton.jit
def _bound(logit, word, top, scale, floor):
    """Compute sieve 3: an upper bound of the score (up to rounding) less `top` / temperature; -inf if truncated."""
    v = ((~word).to(tl.float32) + 0.5) * (2.0**-32)
    # As a fixed-point number, the bits of a float are its binary logarithm, or a little less.
    log2_v = v.to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-23) - 127
    behind = tl.where(logit == top, 0.0, (logit - top) * scale)
    return tl.where(logit >= floor, behind - log2_v * _LOG_2, _NONE)

"""Sampling in one pass over the logits: each program finds the best token of its part of a row, and the last program to
arrive chooses among them.

A token's score is logit / temperature + noise, in float64 (greedy rows: the logit). For nearly all tokens, a cheap
upper bound of the score shows that they lose. A tile of tokens is 256 groups of eight whose noise depends on the same
random words (`sampling/noise.py`): -log(first / 8) for the token that holds the least E of its group, and at most
-log(first / 8 + second / 8) for the others. So a tile passes through sieves of growing cost. Each drops only groups
whose bound is below the best score so far by more than its rounding error:

    1  best logit / T - log a            with some a <= first / 8: one random word for eight tokens
    2  the greater of
         logit / T - log a               for the holder of the least E
         best logit / T - log(a + b)     for the others, with some b <= second / 8
    3  the scores themselves             of four groups at once, those with the greatest bounds first

Sieve 2 reads the logits of holders. For these, a lower bound of the score is as cheap, so the best one of them raises
the goal before any score is computed. How long a score takes is mostly the time for reading its many instructions.

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
from .numerics import LANES, MEMBERS, group_words, noise, ordered, unordered

_ROW_WORDS = tl.constexpr(ROW_WORDS)
_TEMPERATURE = tl.constexpr(TEMPERATURE)
_SEED_LOW, _SEED_HIGH = tl.constexpr(SEED_LOW), tl.constexpr(SEED_HIGH)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_NONE = tl.constexpr(-math.inf)
_INFINITE = tl.constexpr(math.inf)
_LEAST = tl.constexpr(-float(torch.finfo(torch.float32).max))
_MINUS_LOG_2 = tl.constexpr(-math.log(2) * 2.0**-23)  # of a unit of `_log2`
_LOG_2_OF_UNIT = tl.constexpr(math.log(2) * (127 + 35))
_LOG_OF_MEMBERS = tl.constexpr(math.log(MEMBERS.value) - math.log(2) * 0.0862)  # less the error of `_log2`
_MARGIN = tl.constexpr(1e-3)  # above the float32 rounding error of bounds, if logits are not much larger than T
_RELATIVE_MARGIN = tl.constexpr(1e-6)  # ... and if they are
_TILE = tl.constexpr(MEMBERS.value * LANES.value)  # tokens
_AT_ONCE = tl.constexpr(4)  # groups whose scores are computed together: one token a thread
MOST_SHARES = 512  # most programs of a row
SCOREBOARD_WORDS = 32
_SCOREBOARD_WORDS = tl.constexpr(SCOREBOARD_WORDS)

OPTIONS = {"programs": 2112}  # for logits of 16 bits: 16 for each multiprocessor of an H200
NUM_WARPS = 1  # two warps might see different goals, and would diverge
MOST_REGISTERS = {2: 128, 4: 168}  # by the size of a logit: 16 or 12 programs fit a multiprocessor, and nothing spills


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
    tiles = -(-vocab_size // _TILE.value)
    registers = MOST_REGISTERS[logits.itemsize]
    programs = OPTIONS["programs"] * MOST_REGISTERS[2] // registers
    shares = max(1, min(tiles, programs // num_rows, MOST_SHARES))
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
        MOST_SHARES=max(32, triton.next_power_of_2(min(tiles, MOST_SHARES))),
        num_warps=NUM_WARPS,
        maxnreg=registers,
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
    MOST_SHARES: tl.constexpr,
):
    pdl.let_next_start()
    pdl.wait_for_previous()
    share, index = tl.program_id(0), tl.program_id(1)
    logits = logits_ptr + index.to(tl.int64) * logits_stride
    # The first loads start before the row's numbers have arrived.
    tile = _load_tile(logits, share * _TILE, vocab_size)
    row = tl.load(rows_ptr + index).to(tl.int64)
    scoreboard = scoreboards_ptr + index * _SCOREBOARD_WORDS
    best = tl.full([], _NONE, tl.float64)
    winner = tl.full([], 0, tl.int32)
    if row >= 0:
        words = table_ptr + row * _ROW_WORDS
        temperature = tl.load(words + _TEMPERATURE).to(tl.float32, bitcast=True)
        if temperature < _GREEDY_BELOW:
            best, winner = _best_logit(logits, vocab_size, tile)
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
                temperature,
                floor,
                position,
                seed,
                scoreboard,
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
def _best_logit(logits, vocab_size, tile):
    """Return the greatest logit of this program's tiles, and the first token that has it."""
    best = tl.full([], _NONE, tl.float32)
    winner = tl.full([], 0, tl.int32)
    step = tl.num_programs(0) * _TILE
    for start in range(tl.program_id(0) * _TILE, vocab_size, step):
        tile = _known(tile, start, vocab_size)
        greatest = _greatest(tile)
        if _any(greatest > best):
            best = tl.max(greatest)
            winner = _first_of(tile, best, start, vocab_size)
        tile = _load_tile(logits, start + step, vocab_size)
    return best.to(tl.float64), winner


@triton.jit
def _best_score(logits, vocab_size, tile, temperature, floor, position, seed, scoreboard):
    """Return the greatest score of this program's tiles, and the first token that has it."""
    scale = 1 / temperature
    floor = tl.maximum(floor, _LEAST)  # so that -inf and NaN are always below it
    best = tl.full([], _NONE, tl.float64)
    winner = tl.full([], 0, tl.int32)
    goal = tl.full([], _NONE, tl.float32)
    reached = _reached(scoreboard)
    step = tl.num_programs(0) * _TILE
    for start in range(tl.program_id(0) * _TILE, vocab_size, step):
        greatest = _greatest(_known(tile, start, vocab_size))
        tile = _load_tile(logits, start + step, vocab_size)
        goal = tl.maximum(goal, unordered(reached))
        reached = _reached(scoreboard)
        first = group_words(start // MEMBERS, position, seed, 0)
        likely = tl.where(greatest >= floor, _bound(greatest, _at_most_least(first), scale), _NONE)
        if _any(_by_thread(likely) >= goal):
            second = group_words(start // MEMBERS, position, seed, 1)
            bound, sure = _closer_bounds(
                logits, vocab_size, start, greatest, first, second, likely >= goal, scale, floor
            )
            sure = _goal(tl.max(sure))
            if sure > goal:
                goal = sure
                tl.atomic_max(scoreboard, ordered(goal), sem="relaxed")
            # As integers, bounds are reduced over the threads by one instruction.
            none = ordered(tl.full([], _NONE, tl.float32))
            bound = tl.where(bound >= goal, ordered(bound), none)
            lead = tl.max(bound)
            while (lead > none) & (lead >= ordered(goal)):
                token, bound = _take_groups(bound, lead, none, start, vocab_size)
                lead = tl.max(bound)
                reached = _reached(scoreboard)
                logit = tl.load(logits + token, token < vocab_size, _NONE).to(tl.float32)
                score = logit.to(tl.float64) / temperature.to(tl.float64) + noise(token, position, seed)
                score = tl.where(logit >= floor, score, _NONE)
                top = tl.max(score)
                token = tl.min(tl.where(score == top, token, vocab_size))
                better = (top > best) | ((top == best) & (token < winner))
                best = tl.where(better, top, best)
                winner = tl.where(better, token, winner)
                goal = tl.maximum(goal, unordered(reached))
                own = _goal(best)
                if own > goal:
                    goal = own
                    tl.atomic_max(scoreboard, ordered(goal), sem="relaxed")
    return best, winner


@triton.jit
def _closer_bounds(logits, vocab_size, start, greatest, first, second, likely, scale, floor):
    """Return upper bounds `[LANES]` float32 of the groups' best scores, and lower bounds (-inf for unlikely groups)."""
    # The member that holds the least exponential number of its group, and so has the most noise.
    place = (first % MEMBERS).to(tl.int32) * LANES + tl.arange(0, LANES)
    logit = tl.load(logits + start + place, likely & (place < vocab_size - start), _NONE).to(tl.float32)
    least = _at_most_least(first)
    bound = tl.where(logit >= floor, tl.maximum(_bound(logit, least, scale), _LEAST), _NONE)
    others = tl.maximum(_bound(greatest, least + _at_most_least(second), scale), _LEAST)
    bound = tl.maximum(bound, tl.where(greatest >= floor, others, _NONE))
    sure = tl.where(logit >= floor, _lower_bound(logit, first, scale), _NONE)
    return bound, sure


@triton.jit
def _take_groups(bound, lead, none, start, vocab_size):
    """Return the tokens of the groups with the greatest bounds, `[_AT_ONCE * MEMBERS]`, and the bounds without these.

    `vocab_size` stands for tokens of groups that do not exist.
    """
    lane, slot = tl.arange(0, LANES), tl.arange(0, _AT_ONCE * MEMBERS)
    token = tl.full([_AT_ONCE * MEMBERS], vocab_size, tl.int32)
    for which in tl.static_range(_AT_ONCE):
        at = tl.min(tl.where((bound == lead) & (lead > none), lane, LANES))
        token = tl.where((slot // MEMBERS == which) & (at < LANES), start + at + slot % MEMBERS * LANES, token)
        bound = tl.where(lane == at, none, bound)
        lead = tl.max(bound)
    return token, bound


@triton.jit
def _goal(best):
    """Return the bound that a group needs to contend with a score, float32: so much lower that rounding is covered."""
    # Of several infinite scores the first token wins, so groups with an infinite bound must go on.
    return tl.where(best == _INFINITE, best, best - _MARGIN - _RELATIVE_MARGIN * tl.abs(best)).to(tl.float32)


@triton.jit
def _reached(scoreboard):
    """Return the best score that the row's programs have published so far: the same for all threads of a program."""
    return tl.max(tl.load(scoreboard + tl.zeros([32], tl.int32), volatile=True))


@triton.jit
def _load_tile(logits, start, vocab_size):
    """Return the logits `[LANES]` of the members of a tile's groups; undefined past the vocabulary."""
    lane = tl.arange(0, LANES)
    left = vocab_size - start
    at = logits + start + lane
    x0 = tl.load(at, lane < left)
    x1 = tl.load(at + LANES, lane + LANES < left)
    x2 = tl.load(at + 2 * LANES, lane + 2 * LANES < left)
    x3 = tl.load(at + 3 * LANES, lane + 3 * LANES < left)
    x4 = tl.load(at + 4 * LANES, lane + 4 * LANES < left)
    x5 = tl.load(at + 5 * LANES, lane + 5 * LANES < left)
    x6 = tl.load(at + 6 * LANES, lane + 6 * LANES < left)
    x7 = tl.load(at + 7 * LANES, lane + 7 * LANES < left)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _known(tile, start, vocab_size):
    """Return a tile with -inf for tokens past the vocabulary."""
    x0, x1, x2, x3, x4, x5, x6, x7 = tile
    left = vocab_size - start
    if left < _TILE:
        lane = tl.arange(0, LANES)
        none = tl.full(x0.shape, _NONE, x0.dtype)
        x0 = tl.where(lane < left, x0, none)
        x1 = tl.where(lane + LANES < left, x1, none)
        x2 = tl.where(lane + 2 * LANES < left, x2, none)
        x3 = tl.where(lane + 3 * LANES < left, x3, none)
        x4 = tl.where(lane + 4 * LANES < left, x4, none)
        x5 = tl.where(lane + 5 * LANES < left, x5, none)
        x6 = tl.where(lane + 6 * LANES < left, x6, none)
        x7 = tl.where(lane + 7 * LANES < left, x7, none)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _greatest(tile):
    """Return the best logit of each group, `[LANES]` float32; NaN if all are."""
    x0, x1, x2, x3, x4, x5, x6, x7 = tile
    half = _greater(_greater(x0, x1), _greater(x2, x3))
    other = _greater(_greater(x4, x5), _greater(x6, x7))
    return _greater(half, other).to(tl.float32)


@triton.jit
def _first_of(tile, logit, start, vocab_size):
    """Return the lowest token of a tile that has a logit."""
    lane = tl.arange(0, LANES)
    token = tl.full([LANES], vocab_size, tl.int32)
    for member in tl.static_range(MEMBERS):
        here = tl.where(tile[member].to(tl.float32) == logit, start + member * LANES + lane, vocab_size)
        token = tl.minimum(token, here)
    return tl.min(token)


@triton.jit
def _any(condition):
    return tl.max(condition.to(tl.int32)) > 0


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
def _by_thread(values):
    """Return the greatest of each four values, which a thread has, so that the next steps handle fewer values."""
    return tl.max(tl.reshape(values, [values.shape[0] // 4, 4]), 1)


@triton.jit
def _at_most_least(word):
    """Return a float32 that is at most 2**35 times the least of eight exponential numbers, from their word.

    With -log u >= 1 - u; the 29 digits of 1 - u are at least those of u inverted.
    """
    return (~(word | (MEMBERS - 1))).to(tl.float32)


@triton.jit
def _bound(logit, least, scale):
    """Return logit / temperature - log(2**-35 least), up to rounding, or a little more."""
    return tl.fma(logit, scale, tl.fma(_log2(least), _MINUS_LOG_2, _LOG_2_OF_UNIT))


@triton.jit
def _lower_bound(logit, word, scale):
    """Return logit / temperature - log(-log u / 8), up to rounding, or a little less, for the u of a word.

    With -log u <= (1 - u) / u.
    """
    rest = (~(word | (MEMBERS - 1))).to(tl.float32) + MEMBERS
    u = (word - word % MEMBERS).to(tl.float32)
    return tl.fma(logit, scale, (_log2(rest) - _log2(u)) * _MINUS_LOG_2 + _LOG_OF_MEMBERS)


@triton.jit
def _log2(value):
    """Return 2**23 (127 + log2 value), or up to 0.0861 * 2**23 less: the bits of a float as a fixed-point number."""
    return value.to(tl.int32, bitcast=True).to(tl.float32)

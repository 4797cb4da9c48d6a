"""Log-probabilities in one pass over the logits.

    shares   a program per share of a row: greatest logit, sum of exponentials, number of logits above the chosen
             token's, and the best `k` so far, which a tile changes only if one of its logits is above the worst of them
    rows     a program per row: merges its shares, and sorts the best

A logit and its token are packed into one integer that orders by logit, then by descending token. So the greatest of a
tile can be found and removed without searching for its position.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_NONE = tl.constexpr(-math.inf)
_LEAST_LOGIT = tl.constexpr(torch.finfo(torch.float32).min)  # finite, so that logit - it is never NaN
_LEAST_KEY, _GREATEST_KEY = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)
_TOKEN = tl.constexpr(2**32 - 1)
TILE = 512  # tokens
MOST_ALTERNATIVES = 32  # a power of two; more are selected by torch
MOST_SHARES = 64  # shares of a row
PROGRAMS = 2112  # aimed number of shares of all rows: 16 warps per multiprocessor of an H200


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `baton.kernels.logprobs.token_logprobs`. An id outside the vocabulary has logprob -inf."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    chosen, normalizer, rank = new(num_rows), new(num_rows), new(num_rows, dtype=torch.int64)
    top_ids, top_logprobs = new(num_rows, k, dtype=torch.int64), new(num_rows, k)
    if not num_rows:
        return chosen, rank, top_ids, top_logprobs
    shares = max(1, min(-(-vocab_size // TILE), MOST_SHARES, PROGRAMS // num_rows))
    alternatives = k if k <= MOST_ALTERNATIVES else 0
    best, weight = new(num_rows, shares), new(num_rows, shares)
    above = new(num_rows, shares, dtype=torch.int32)
    keys = new(num_rows, shares, MOST_ALTERNATIVES, dtype=torch.int64)
    inputs = (logits, token_ids, vocab_size, logits.stride(0), token_ids.stride(0), alternatives)
    partial = (best, weight, above, keys)
    shares_kernel[(shares, num_rows)](*inputs, *partial, TILE=TILE, SLOTS=MOST_ALTERNATIVES, num_warps=1)
    rows_kernel[(num_rows,)](
        *inputs,
        *partial,
        chosen,
        normalizer,
        rank,
        top_ids,
        top_logprobs,
        shares,
        MOST_SHARES=MOST_SHARES,
        SLOTS=MOST_ALTERNATIVES,
        num_warps=4,
    )
    if k > alternatives:
        top_logits, top_ids = logits.topk(k, dim=-1)
        top_logprobs = top_logits.float() - normalizer[:, None]
    return chosen, rank, top_ids, top_logprobs


@triton.jit(do_not_specialize=["token_ids_ptr", "ids_stride", "alternatives"])
def shares_kernel(
    logits_ptr,  # [R, V]
    token_ids_ptr,  # [R] int64
    vocab_size,
    logits_stride,
    ids_stride,
    alternatives,
    best_ptr,  # [R, shares] float32
    weight_ptr,  # [R, shares] float32: sum of exp(logit - best)
    above_ptr,  # [R, shares] int32
    keys_ptr,  # [R, shares, SLOTS] int64, in any order
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    share, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits = logits_ptr + row * logits_stride
    mine = _logit_of(logits, tl.load(token_ids_ptr + row * ids_stride), vocab_size)
    best = tl.full([], _LEAST_LOGIT, tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    above = tl.zeros([TILE], tl.int32)
    slot = tl.arange(0, SLOTS).to(tl.int64)
    # Unused slots have the greatest key, so that they are never the worst.
    kept = tl.where(slot < alternatives, _LEAST_KEY + slot, _GREATEST_KEY)
    worst = tl.min(kept)
    token = share * TILE + tl.arange(0, TILE)
    step = tl.num_programs(0) * TILE
    following = tl.load(logits + token, token < vocab_size, _NONE)
    for _ in range(share * TILE, vocab_size, step):
        logit = tl.maximum(following.to(tl.float32), _NONE)
        following = tl.load(logits + token + step, token + step < vocab_size, _NONE)
        if tl.max((logit > best).to(tl.int32)) > 0:
            greater = tl.max(logit)
            weight *= tl.exp(best - greater)
            best = greater
        weight += tl.exp(logit - best)
        above += (logit > mine).to(tl.int32)
        if (worst < _GREATEST_KEY) & (tl.max((~(logit < _logit_of_key(worst))).to(tl.int32)) > 0):
            keys = tl.where(token < vocab_size, _key(logit, token), _LEAST_KEY)
            lead = tl.max(keys)
            while lead > worst:
                kept = tl.where(kept == worst, lead, kept)
                worst = tl.min(kept)
                keys = tl.where(keys == lead, _LEAST_KEY, keys)
                lead = tl.max(keys)
        token += step
    at = row * tl.num_programs(0) + share
    tl.store(best_ptr + at, best)
    tl.store(weight_ptr + at, tl.sum(weight))
    tl.store(above_ptr + at, tl.sum(above))
    tl.store(keys_ptr + at * SLOTS + slot, tl.where(slot < alternatives, kept, _LEAST_KEY))


@triton.jit(do_not_specialize=["token_ids_ptr", "ids_stride", "alternatives", "shares"])
def rows_kernel(
    logits_ptr,
    token_ids_ptr,
    vocab_size,
    logits_stride,
    ids_stride,
    alternatives,
    best_ptr,
    weight_ptr,
    above_ptr,
    keys_ptr,
    chosen_ptr,  # [R] float32
    normalizer_ptr,  # [R] float32
    rank_ptr,  # [R] int64
    top_ids_ptr,  # [R, k] int64
    top_logprobs_ptr,  # [R, k] float32
    shares,
    MOST_SHARES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, MOST_SHARES)
    at = row * shares + share
    best = tl.load(best_ptr + at, share < shares, _NONE)
    weight = tl.load(weight_ptr + at, share < shares, 0.0)
    above = tl.load(above_ptr + at, share < shares, 0)
    greatest = tl.max(best)
    total = tl.sum((weight * tl.exp(best - greatest)).to(tl.float64))
    normalizer = greatest.to(tl.float64) + tl.log(total)
    mine = _logit_of(logits_ptr + row * logits_stride, tl.load(token_ids_ptr + row * ids_stride), vocab_size)
    tl.store(chosen_ptr + row, (mine - normalizer).to(tl.float32))
    tl.store(normalizer_ptr + row, normalizer.to(tl.float32))
    tl.store(rank_ptr + row, 1 + tl.sum(above).to(tl.int64))
    if alternatives > 0:
        candidate = tl.arange(0, MOST_SHARES * SLOTS)
        keys = tl.load(keys_ptr + row * shares * SLOTS + candidate, candidate < shares * SLOTS, _LEAST_KEY)
        for place in range(alternatives):
            lead = tl.max(keys)
            keys = tl.where(keys == lead, _LEAST_KEY, keys)
            logprob = _logit_of_key(lead).to(tl.float64) - normalizer
            tl.store(top_ids_ptr + row * alternatives + place, ~lead & _TOKEN)
            tl.store(top_logprobs_ptr + row * alternatives + place, logprob.to(tl.float32))


@triton.jit
def _logit_of(logits, token, vocab_size):
    known = (token >= 0) & (token < vocab_size)
    return tl.load(logits + token, known, _NONE).to(tl.float32)


@triton.jit
def _key(logit, token):
    """Return an int64 that is greater for a greater logit, and for equal logits greater for a lower token."""
    bits = logit.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (~token.to(tl.int64) & _TOKEN)


@triton.jit
def _logit_of_key(key):
    """Return the logit of a key; NaN for an empty slot."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

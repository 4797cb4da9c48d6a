"""Stateless random numbers: the noise of a token is a function of (seed, position, token id).

So a request draws the same tokens whether it runs alone, batched, after preemption or on another machine. Two rules
ensure this on every device: integers come from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011), and logarithms use only additions, multiplications and divisions in float64, whose rounding IEEE 754
fixes.

A token's noise is -log E, where the E of all tokens are independent and exponentially distributed with mean 1: standard
Gumbel noise. The least E of eight tokens is exponential with mean 1/8, each of the eight is equally likely to have it,
and what the others have above it is again independent and exponential with mean 1 (Renyi, "On the theory of order
statistics", 1953). So E can be built from the least of a group, and what is above it in the same way once more:

    E(token) = first / 8                             of the token that has the least E of its group
               first / 8 + second / 8                of the token that has the least rest
               first / 8 + second / 8 + third        of the others

One random word, that of `first`, then limits the noise of eight tokens, and tells which of them can reach the limit.

    group    tokens 2048 * b + j + (0, 256, 512, ... 1792) are the members 0 ... 7 of group 256 * b + j
    key      (seed low, seed high)                                           words of 32 bits
    counter  (index // 4, position low, position high, level), and of its four words the one of number index % 4
    level    0 for `first`, 1 for `second` (the index is the group), 2 for `third` (the index is the token)
    word     levels 0 and 1: the lowest three bits are the number of the member that has the least; the other 29, like
             all 32 of level 2, are the digits of a uniform number u in (0, 1), and -log u is exponential

Members of a group are 256 tokens apart, so that vector units with up to 256 lanes find the best logits of as many
groups without exchanging values between lanes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MEMBERS = 8  # tokens of a group
LANES = 256  # tokens between two members of a group
WORD_BITS, MEMBER_BITS = 32, 3
SERIES_TERMS = 11  # terms of the artanh series: enough for float64 if |s| <= 3 - 2 * sqrt(2)
_WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return four random 32-bit words per counter. All tensors hold words as int64, and their shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two words may wrap to a negative int64; its 64 bits are right, and the masks drop the sign.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _WORD) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32 & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = k0 + KEY_STEPS[0] & _WORD, k1 + KEY_STEPS[1] & _WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def random_words(count: int, seeds: Tensor, positions: Tensor, level: int) -> Tensor:
    """Return the 32-bit random words [R, count] as int64 of the first `count` groups or tokens, for `seeds` [R]."""
    position, seed = positions[:, None], seeds[:, None]
    words = philox(
        (
            torch.arange(-(-count // 4), device=seeds.device)[None],
            position & _WORD,
            position >> 32 & _WORD,
            torch.full_like(position, level),
        ),
        (seed & _WORD, seed >> 32 & _WORD),
    )
    return torch.stack(words, dim=-1).flatten(1)[:, :count]


def noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return the noise [R, V] in float64 of all tokens, for `seeds` and `positions` [R]."""
    tokens = torch.arange(vocab_size, device=seeds.device)
    group = tokens // (MEMBERS * LANES) * LANES + tokens % LANES
    member = tokens // LANES % MEMBERS
    num_groups = -(-vocab_size // (MEMBERS * LANES)) * LANES
    first, second = (random_words(num_groups, seeds, positions, level)[:, group] for level in (0, 1))
    third = exponential(random_words(vocab_size, seeds, positions, 2), WORD_BITS)
    rest = torch.where(member == second % MEMBERS, 0.0, third)
    above = torch.where(member == first % MEMBERS, 0.0, _least(second) + rest)
    return -portable_log(_least(first) + above)


def _least(words: Tensor) -> Tensor:
    """Return the least of eight exponentially distributed numbers, in float64, from words of level 0 or 1."""
    return exponential(words >> MEMBER_BITS, WORD_BITS - MEMBER_BITS) / MEMBERS


def exponential(digits: Tensor, bits: int) -> Tensor:
    """Return -log u in float64 for u = (digits + 1/2) / 2**bits."""
    return -portable_log((digits.double() + 0.5) * 2.0**-bits)


def portable_log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive, finite float64, with the same bits on every device.

    With x = m * 2**e and m near 1: log x = e log 2 + 2 artanh((m - 1) / (m + 1)).
    """
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    exponent = torch.where(small, exponent - 1, exponent).double()
    s = (mantissa - 1) / (mantissa + 1)
    z = s * s
    series = torch.full_like(s, 2 / (2 * SERIES_TERMS - 1))
    for term in range(SERIES_TERMS - 2, -1, -1):
        series = series * z + 2 / (2 * term + 1)
    return exponent * math.log(2) + s * series

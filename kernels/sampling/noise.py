"""Stateless random numbers: the noise of a token is a function of (seed, position, token id).

So a request draws the same tokens alone, batched, preempted or moved to another machine. Two rules keep it so on every
device: integers come from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and
the logarithms are made of additions, multiplications and divisions in float64, which IEEE 754 rounds one way only.

    key      (seed low, seed high)                              words of 32 bits
    counter  (16 * (token // 64) + token % 16, position low, position high, 0)
    token    takes word (token // 16) % 4 of the four that its counter gives

Groups of 64 tokens share 16 neighbouring counters, so vector units of up to 16 lanes read logits and noise in order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
GROUP = 64  # tokens that share counters
LANES = 16  # counters of a group
SERIES_TERMS = 11  # of the inverse hyperbolic tangent: enough for float64 where |s| <= 3 - 2 * sqrt(2)
_WORD = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return four random words of 32 bits a counter. All tensors are int64 that hold words, of shapes that
    broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two words may wrap to a negative int64; its 64 bits are right, and the masks take the sign away.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _WORD) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32 & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = k0 + KEY_STEPS[0] & _WORD, k1 + KEY_STEPS[1] & _WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def random_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return `[R, V]` int64 words of 32 bits for `seeds` and `positions` `[R]`."""
    groups = -(-vocab_size // GROUP)
    counters = torch.arange(groups * LANES, device=seeds.device)[None]
    position, seed = positions[:, None], seeds[:, None]
    words = philox(
        (counters, position & _WORD, position >> 32 & _WORD, torch.zeros_like(position)),
        (seed & _WORD, seed >> 32 & _WORD),
    )
    by_group = torch.stack([word.unflatten(1, (groups, LANES)) for word in words], dim=2)
    return by_group.flatten(1)[:, :vocab_size]


def portable_log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive, finite float64, the same bits on every device.

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


def gumbel(words: Tensor) -> Tensor:
    """Return standard Gumbel noise in float64 from words of 32 bits: -log(-log u) with u = (word + 1/2) / 2**32."""
    uniform = (words.double() + 0.5) * 2.0**-32
    return -portable_log(-portable_log(uniform))

"""Stateless random numbers: the noise of a token is a function of (seed, position, token id).

So a request draws the same tokens whether it runs alone, batched, after preemption or on another machine. Two rules
ensure this on every device: integers come from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011), and logarithms use only additions, multiplications and divisions in float64, whose rounding IEEE 754
fixes.

    key      (seed low, seed high)                              words of 32 bits
    counter  (16 * (token // 64) + token % 16, position low, position high, 0)
    token    uses word (token // 16) % 4 of its counter's four words

Groups of 64 tokens share 16 consecutive counters, so that vector units with up to 16 lanes read logits and noise in
order.
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


def random_words(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return 32-bit random words [R, V] as int64 for `seeds` and `positions` [R]."""
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


def gumbel(words: Tensor) -> Tensor:
    """Return standard Gumbel noise in float64 from words of 32 bits: -log(-log u) with u = (word + 1/2) / 2**32."""
    uniform = (words.double() + 0.5) * 2.0**-32
    return -portable_log(-portable_log(uniform))

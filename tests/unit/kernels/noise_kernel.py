"""A kernel that stores the random words of tokens and their noise, for the tests of `sampling/gpu/numerics.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.sampling.gpu import numerics as noise


def words_and_noise(num_tokens: int, seed: int, position: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the words `[num_tokens]` int64 and the noise `[num_tokens]` float64 of all tokens below a power of two."""
    key = torch.tensor([seed, position], device=device)
    words = torch.empty(num_tokens, dtype=torch.int64, device=device)
    values = torch.empty(num_tokens, dtype=torch.float64, device=device)
    _write[(1,)](key, words, values, num_tokens, enable_fp_fusion=False)
    return words, values


@triton.jit
def _write(key_ptr, words_ptr, noise_ptr, NUM_TOKENS: tl.constexpr):
    token = tl.arange(0, NUM_TOKENS)
    word = noise.word_of(token, tl.load(key_ptr + 1), tl.load(key_ptr))
    tl.store(words_ptr + token, word.to(tl.int64))
    tl.store(noise_ptr + token, noise.gumbel(word))

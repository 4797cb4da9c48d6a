"""A kernel that stores the noise of tokens, for the tests of `sampling/gpu/numerics.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.sampling.gpu import numerics


def noise_of_tokens(num_tokens: int, seed: int, position: int, device: torch.device) -> Tensor:
    """Return the noise `[num_tokens]` float64 of all tokens below a power of two."""
    key = torch.tensor([seed, position], device=device)
    values = torch.empty(num_tokens, dtype=torch.float64, device=device)
    _write[(1,)](key, values, num_tokens, enable_fp_fusion=False)
    return values


@triton.jit
def _write(key_ptr, noise_ptr, NUM_TOKENS: tl.constexpr):
    token = tl.arange(0, NUM_TOKENS)
    tl.store(noise_ptr + token, numerics.noise(token, tl.load(key_ptr + 1), tl.load(key_ptr)))

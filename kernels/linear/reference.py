"""The definition of a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [T, K], weight [N, K], bias [N]. Sums in float32 (float64 where x is), rounded once."""
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    result = x.to(compute_dtype) @ weight.to(compute_dtype).T
    if bias is not None:
        result = result + bias.to(compute_dtype)
    return result.to(x.dtype)

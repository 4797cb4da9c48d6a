"""Reference of the gated activation of Llama-like feed-forward layers (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """See `baton.kernels.silu_and_mul.silu_and_mul`. Computes in float32 (float64 where `gate_up` is), rounds once."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    result = (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
    return result if out is None else out.copy_(result)

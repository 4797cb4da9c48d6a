"""The gated feed-forward layer of Llama and its successors (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.silu_and_mul import silu_and_mul

from .base import Layer
from .linear import Linear, MergedLinear

CPU_SLICE = 512  # tokens whose intermediate activations stay in the last-level cache between the two products


class GatedMLP(Layer):
    """down(silu(gate(x)) * up(x)) over [T, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        if hidden.is_cpu and len(hidden) > CPU_SLICE:
            return torch.cat([self._all_at_once(rows) for rows in hidden.split(CPU_SLICE)])
        return self._all_at_once(hidden)

    def _all_at_once(self, hidden: Tensor) -> Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))

"""Reference of the gated activations (SwiGLU and GEGLU, arXiv:2002.05202) and of the soft cap (arXiv:2408.00118)."""

from __future__ import annotations

import enum

import torch
from torch import Tensor
from torch.nn import functional


class Activation(enum.Enum):
    """The activation of a gate. Values are the names by which kernels are specialized."""

    SILU = "silu"  # x * sigmoid(x)
    GELU_TANH = "gelu_tanh"  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), an approximation of GELU


def activation_and_mul(gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
    """See `baton.kernels.activation.activation_and_mul`. Computes in float32 (float64 where `gate_up` is)."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    result = (activate(gate, activation) * up).to(gate_up.dtype)
    return result if out is None else out.copy_(result)


def activate(gate: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.SILU:
            return functional.silu(gate)
        case Activation.GELU_TANH:
            return functional.gelu(gate, approximate="tanh")


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """See `baton.kernels.activation.soft_cap`. Computes in float32 (float64 where `x` is), rounds once."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.copy_(cap * torch.tanh(values / cap))

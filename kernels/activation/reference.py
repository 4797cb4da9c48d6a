"""Reference of activations, gated (SwiGLU and GEGLU, arXiv:2002.05202) and plain, and of the soft cap of logits.

The squared ReLU is from arXiv:2109.08668, the soft cap from arXiv:2408.00118.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import elementwise


class Activation(enum.Enum):
    """The activation of a gate. Kernels are specialized by its value."""

    SILU = "silu"  # x * sigmoid(x)
    GELU_TANH = "gelu_tanh"  # x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), an approximation of GELU


class Pointwise(enum.Enum):
    """An activation without gates. Kernels are specialized by its value."""

    RELU2 = "relu2"  # max(x, 0)^2


def activation_and_mul(gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
    """See `baton.kernels.activation.activation_and_mul`. Computes in float32 (float64 if `gate_up` is)."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    result = (activate(gate, activation) * up).to(gate_up.dtype)
    return result if out is None else out.copy_(result)


def activate(gate: Tensor, activation: Activation) -> Tensor:
    match activation:
        case Activation.SILU:
            return elementwise.silu(gate)
        case Activation.GELU_TANH:
            return elementwise.gelu_tanh(gate)


def activate_each(x: Tensor, activation: Pointwise) -> Tensor:
    """See `baton.kernels.activation.activate_each`. Computes in float32 (float64 if `x` is), rounds once."""
    return x.copy_(pointwise(x.to(torch.promote_types(x.dtype, torch.float32)), activation))


def pointwise(values: Tensor, activation: Pointwise) -> Tensor:
    match activation:
        case Pointwise.RELU2:
            return functional.relu(values).square()


def gate_heads(x: Tensor, gate: Tensor, add_to: Tensor | None = None) -> Tensor:
    """See `baton.kernels.activation.gate_heads`. Computes in float32 (float64 if `x` is), rounds once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gated = x.to(wide) * elementwise.sigmoid(gate.to(wide))
    return x.copy_(gated) if add_to is None else add_to.copy_(add_to.to(wide) + gated.flatten(1))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """See `baton.kernels.activation.soft_cap`. Computes in float32 (float64 if `x` is), rounds once."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.copy_(cap * torch.tanh(values / cap))

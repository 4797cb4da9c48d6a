"""Element-wise functions around matrix products: activations, gated and plain, and the soft cap of logits."""

from __future__ import annotations

from torch import Tensor

from . import cpu, reference
from .reference import Activation, Pointwise

__all__ = ["Activation", "Pointwise", "activate_each", "activation_and_mul", "gate_heads", "soft_cap"]


def activation_and_mul(gate_up: Tensor, activation: Activation, out: Tensor | None = None) -> Tensor:
    """Return `activation(gate) * up` [T, F] of gate_up [T, 2 F], gates first. Computed in float32, rounded once."""
    if gate_up.is_cpu:
        return cpu.activation_and_mul(gate_up, activation, out)
    if gate_up.is_cuda:
        from . import gpu

        return gpu.activation_and_mul(gate_up, activation, out)
    return reference.activation_and_mul(gate_up, activation, out)


def activate_each(x: Tensor, activation: Pointwise) -> Tensor:
    """Apply `activation` to each value of x [T, N] in place, and return x. Computed in float32, rounded once.

    Raises `ValueError` if rows are not contiguous.
    """
    _check_rows(x)
    if x.is_cpu:
        return cpu.activate_each(x, activation)
    if x.is_cuda:
        from . import gpu

        return gpu.activate_each(x, activation)
    return reference.activate_each(x, activation)


def gate_heads(x: Tensor, gate: Tensor, add_to: Tensor | None = None) -> Tensor:
    """Multiply the heads x [T, H, D] by `sigmoid(gate)`, with a gate for every value [T, H, D] or head [T, H, 1].

    The product replaces x, or is added to `add_to` [T, H * D] in place; the written tensor is returned. Computed in
    float32, rounded once. Raises `ValueError` if a head's values are not contiguous, or shapes do not match.
    """
    num_tokens, heads, dim = x.shape
    if gate.shape not in ((num_tokens, heads, dim), (num_tokens, heads, 1)):
        raise ValueError(f"gate {list(gate.shape)}: give {list(x.shape)}, or one value a head")
    if add_to is not None and (add_to.shape != (num_tokens, heads * dim) or not add_to.is_contiguous()):
        raise ValueError(f"add_to {list(add_to.shape)}: give contiguous [{num_tokens}, {heads * dim}]")
    if x.stride(2) != 1 or gate.stride(2) != 1:
        raise ValueError("the values of a head must be contiguous, in x and gate")
    if x.is_cuda:
        from . import gpu

        return gpu.gate_heads(x, gate, add_to)
    return reference.gate_heads(x, gate, add_to)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Replace x [R, N] by `cap * tanh(x / cap)` in place, and return x. Computed in float32, rounded once.

    Raises `ValueError` if the cap is not positive, or rows are not contiguous.
    """
    if not cap > 0:
        raise ValueError(f"cap is {cap}: give more than 0")
    _check_rows(x)
    if x.is_cpu:
        return cpu.soft_cap(x, cap)
    if x.is_cuda:
        from . import gpu

        return gpu.soft_cap(x, cap)
    return reference.soft_cap(x, cap)


def _check_rows(x: Tensor) -> None:
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x is {list(x.shape)} with strides {list(x.stride())}: give contiguous rows")

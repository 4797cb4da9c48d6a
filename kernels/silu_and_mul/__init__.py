"""The gated activation of Llama-like feed-forward layers."""

from __future__ import annotations

from torch import Tensor

from . import cpu, reference

__all__ = ["silu_and_mul"]


def silu_and_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute `silu(gate) * up` of gate_up [T, 2 F], the gates first -> [T, F]. In float32, rounded once."""
    if gate_up.is_cpu:
        return cpu.silu_and_mul(gate_up, out)
    if gate_up.is_cuda:
        from . import gpu

        return gpu.silu_and_mul(gate_up, out)
    return reference.silu_and_mul(gate_up, out)

"""Element-wise operations of the expert kernels on values in registers: activations, FP8 dequantization."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.activation import Pointwise
from baton.kernels.activation.gpu import activated
from baton.kernels.moe import experts
from baton.kernels.moe.experts import GatedActivation

BLOCK = tl.constexpr(experts.BLOCK)


def activation_constants(activation: GatedActivation | Pointwise) -> dict[str, float | str | None]:
    """Return a kernel's compile-time arguments for an activation. Each activation is compiled separately."""
    if isinstance(activation, Pointwise):
        return {"UNGATED": activation.value, "GATE": None, "SLOPE": 0.0, "LIMIT": None, "SHIFT": 0.0}
    of_ups = {"LIMIT": activation.limit, "SHIFT": activation.shift}
    return {"UNGATED": None, "GATE": activation.gate.value, "SLOPE": activation.slope, **of_ups}


@triton.jit
def activated_columns(
    products,  # [ROWS, COLUMNS] float32
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNGATED: tl.constexpr,  # the activation of ups without gates; None: columns of gates and ups are interleaved
    GATE: tl.constexpr,  # the activation of gates
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return the activation of a product: [ROWS, COLUMNS / 2]; without gates [ROWS, COLUMNS]."""
    if UNGATED is None:
        gate, up = tl.split(tl.reshape(products, [ROWS, COLUMNS // 2, 2]))
        result = gated(gate, up, GATE, SLOPE, LIMIT, SHIFT)
    else:
        result = activated(products, UNGATED)
    return result


@triton.jit
def gated(gate, up, GATE: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """Apply `GatedActivation` to gate and up, both float32."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
    if SHIFT != 0.0:
        up += SHIFT
    if GATE == "silu":
        result = gate / (1.0 + tl.exp(-SLOPE * gate)) * up
    else:
        result = activated(gate, GATE) * up
    return result


@triton.jit
def gate_up_scales(scale, expert, column, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, UNGATED: tl.constexpr):
    """Return pointers to the first scale of each of these rows of `gate_up`: even rows are gates, odd ones ups."""
    PARTS: tl.constexpr = 2 if UNGATED is None else 1
    ROWS: tl.constexpr = (COLUMNS + PARTS * BLOCK - 1) // (PARTS * BLOCK) * PARTS
    DEEP: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
    row = column // (PARTS * BLOCK) * PARTS + column % PARTS
    return scale + expert.to(tl.int64) * (ROWS * DEEP) + row * DEEP


@triton.jit
def down_scales(scale, expert, column, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """Return pointers to the first scale of each of these rows of `down`."""
    ROWS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    DEEP: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
    return scale + expert.to(tl.int64) * (ROWS * DEEP) + column // BLOCK * DEEP


@triton.jit
def dequantized(weight, scale_rows, start, DTYPE: tl.constexpr):
    """Dequantize a tile [columns, depth] that begins at depth `start` and lies within one block of scales, to DTYPE."""
    factor = tl.load(scale_rows + start // BLOCK)
    return (weight.to(tl.float32) * factor[:, None]).to(DTYPE)

"""What stands between the two products of an expert, on numbers that lie in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.moe.activation import GatedActivation


def constants(activation: GatedActivation) -> dict[str, float | None]:
    """As the kernels take them: each activation is a variant of its own."""
    return {"SLOPE": activation.slope, "LIMIT": activation.limit, "SHIFT": activation.shift}


@triton.jit
def gated(gate, up, SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """See `GatedActivation`; gate and up in float32."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT)
    if SHIFT != 0.0:
        up += SHIFT
    return gate / (1.0 + tl.exp(-SLOPE * gate)) * up

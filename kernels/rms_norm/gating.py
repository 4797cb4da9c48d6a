"""The functions of a gate that a norm's result is multiplied with."""

from __future__ import annotations

import enum


class Gating(enum.Enum):
    """SILU: x * sigmoid(x) (Gated DeltaNet); SIGMOID: sigmoid(x) (Kimi Delta Attention)."""

    SILU = "silu"
    SIGMOID = "sigmoid"
